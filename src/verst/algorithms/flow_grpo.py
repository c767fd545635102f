"""Flow-GRPO (arXiv 2505.05470): the clipped policy-gradient loss over denoising steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class PolicyLoss(NamedTuple):
    loss: Float[Tensor, " B"]
    """Per pair."""
    ratio: Float[Tensor, " B"]
    """p_new / p_old, per pair."""
    clipped: Float[Tensor, " B"]
    """1 where the ratio is outside the clip range."""


def policy_loss(
    log_prob: Float[Tensor, " B"],
    old_log_prob: Float[Tensor, " B"],
    advantage: Float[Tensor, " B"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) per pair, with rho = exp(log_prob - old_log_prob)."""
    ratio = torch.exp(log_prob - old_log_prob)
    limited = ratio.clamp(1 - clip_low, 1 + clip_high)
    outside = ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).to(ratio.dtype)
    return PolicyLoss(torch.maximum(-advantage * ratio, -advantage * limited), ratio, outside)
