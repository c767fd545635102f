"""Flow matching: sigma grids, transitions and their log-probs, the rollout controller, the denoise loop.

Letters: x_sigma = (1 - sigma) x0 + sigma eps, velocity v = eps - x0, grid sigma_0 = 1 > ... > sigma_T = 0.
Engine and trainer both call what is here; neither has a copy.
"""
