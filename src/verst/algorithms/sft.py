"""Supervised flow matching: which noise levels are trained, what the model sees, and the squared velocity error.

x_sigma = (1 - sigma) x0 + sigma eps; the target is d x_sigma / d sigma = eps - x0 (rectified flow, arXiv 2209.03003).
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

SigmaDraw = Literal["uniform", "logit_normal", "mixed", "shifted"]


def draw_sigmas(
    kind: SigmaDraw, uniform: Float[Tensor, " B"], *, mean: float = 0.0, std: float = 1.0, shift: float = 1.0
) -> Float[Tensor, " B"]:
    """Noise levels in [0, 1] from uniform numbers in [0, 1).

    uniform: the numbers themselves. logit_normal: sigmoid of the normal (mean, std) with those quantiles, which favours
    the middle (arXiv 2403.03206). mixed: first half of the batch uniform, the rest logit-normal. shifted:
    s u / (1 + (s - 1) u), the static shift of the same paper.
    """
    if kind == "uniform":
        return uniform
    if kind == "shifted":
        return shift * uniform / (1 + (shift - 1) * uniform)
    logit_normal = torch.sigmoid(mean + std * torch.special.ndtri(uniform))
    if kind == "logit_normal":
        return logit_normal
    half = len(uniform) // 2
    return torch.cat([uniform[:half], logit_normal[half:]])


def grid_sigmas(grid: Float[Tensor, " T"], uniform: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """One of the noise levels that sampling steps start from, all alike often. uniform: in [0, 1)."""
    index = (uniform * len(grid)).long().clamp(max=len(grid) - 1)
    return grid[index]


def noised(
    x0: Float[Tensor, "B ..."], eps: Float[Tensor, "B ..."], sigma: Float[Tensor, " B"]
) -> Float[Tensor, "B ..."]:
    """x_sigma = (1 - sigma) x0 + sigma eps."""
    rows = sigma.view(-1, *([1] * (x0.ndim - 1)))
    return (1 - rows) * x0 + rows * eps


def matching_error(v: Float[Tensor, "B ..."], target: Float[Tensor, "B ..."]) -> Float[Tensor, " B"]:
    """Mean over a sample's elements of (v - target)^2, per sample."""
    return ((v - target) ** 2).flatten(1).mean(dim=1)


def velocity_loss(
    v: Float[Tensor, "B ..."], x0: Float[Tensor, "B ..."], eps: Float[Tensor, "B ..."]
) -> Float[Tensor, " B"]:
    """The matching error against eps - x0, per sample."""
    return matching_error(v, eps - x0)


def min_snr_weight(sigma: Float[Tensor, " B"], gamma: float) -> Float[Tensor, " B"]:
    """min((1 - sigma)^2, gamma sigma^2): min-SNR (arXiv 2303.09556) of the clean sample's error, which is sigma times v's.

    SNR = ((1 - sigma) / sigma)^2, and the weight of the velocity error is sigma^2 min(SNR, gamma).
    """
    return torch.minimum((1 - sigma) ** 2, gamma * sigma**2)
