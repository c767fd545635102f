"""DiffusionNFT (arXiv 2509.16117): a reward turns the flow-matching loss towards good samples and away from bad ones.

Needs only the clean samples x0 of a rollout by any sampler: no log-probs, no stochastic steps.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class NftLoss(NamedTuple):
    loss: Float[Tensor, " B"]
    """Per pair."""
    positive: Float[Tensor, " B"]
    """L+, the weighted reconstruction error of the implicit positive policy."""
    negative: Float[Tensor, " B"]
    """L-, of the implicit negative policy."""


def nft_loss(
    v: Float[Tensor, "B ..."],
    v_old: Float[Tensor, "B ..."],
    x_t: Float[Tensor, "B ..."],
    x0: Float[Tensor, "B ..."],
    t: Float[Tensor, " B"],
    advantage: Float[Tensor, " B"],
    *,
    beta: float,
    advantage_clip: float,
) -> NftLoss:
    """c (q L+ + (1 - q) L-) / beta per pair, with c = advantage_clip and q = clamp(A / c, -1, 1) / 2 + 1 / 2.

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v, x+- = x_t - t v+-, and
    L+- = mean((x+- - x0)^2) / max(1e-5, mean |x+- - x0|), the denominator in float64 and without a gradient.
    v_old comes from the policy that made x0.
    """
    rows = t.view(-1, *([1] * (x_t.ndim - 1)))
    positive = _reconstruction(x_t - rows * (beta * v + (1 - beta) * v_old), x0)
    negative = _reconstruction(x_t - rows * ((1 + beta) * v_old - beta * v), x0)
    q = (advantage / advantage_clip).clamp(-1, 1) / 2 + 0.5
    return NftLoss(advantage_clip * (q * positive + (1 - q) * negative) / beta, positive, negative)


def _reconstruction(x: Tensor, x0: Tensor) -> Tensor:
    error = x - x0
    weight = error.detach().double().abs().flatten(1).mean(dim=1).clamp(min=1e-5)
    return (error.flatten(1) ** 2).mean(dim=1) / weight.to(error.dtype)


def old_policy_decay(rollout: int, *, flat: int, ramp: float, largest: float) -> float:
    """Decay of the old policy after rollout number `rollout` (from 0): min(ramp * (rollout - flat), largest), at least 0.

    0 makes the old policy the live one. The paper's schedules are (0, 0.001, 0.5) and (75, 0.0075, 0.999).
    """
    return min(max(0.0, ramp * (rollout - flat)), largest)
