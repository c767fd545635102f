"""The float64 reference of every transition, log-prob and KL: the papers' formulas and torch's own distributions.

Nothing here comes from verst: the sde forms are written with the score, cps with its angle.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributions import Normal, kl_divergence


def step(
    kind: str, eta: float, x: Tensor, v: Tensor, *, sigma: float, next_sigma: float, first_sigma: float
) -> tuple[Tensor, float]:
    """(mean, std) of the next latent in float64."""
    x, v, dt = x.double(), v.double(), next_sigma - sigma
    if kind == "ode":
        return x + dt * v, 0.0
    if kind == "cps":
        clean, noisy, angle = x - sigma * v, x + (1 - sigma) * v, eta * math.pi / 2
        return (1 - next_sigma) * clean + next_sigma * math.cos(angle) * noisy, next_sigma * math.sin(angle)
    g = eta if kind == "dance" else eta * math.sqrt(sigma / (1 - (first_sigma if sigma == 1 else sigma)))
    score = -(x + (1 - sigma) * v) / sigma
    return x + (v - g**2 / 2 * score) * dt, g * math.sqrt(-dt)


def log_prob(x_next: Tensor, mean: Tensor, std: float) -> Tensor:
    """[B]: mean over a sample's elements."""
    return Normal(mean, std).log_prob(x_next.double()).flatten(1).mean(dim=1)


def kl(mean: Tensor, mean_ref: Tensor, std: float) -> Tensor:
    """[B]: mean over a sample's elements."""
    return kl_divergence(Normal(mean, std), Normal(mean_ref, std)).flatten(1).mean(dim=1)
