"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO with a ratio of equal mean and spread at all noise levels.

The ratio of a step is biased below 1 by the move of its mean, and moves more the less noise the step has; then the clip
holds back some steps and never others. Here the bias is added back and the logarithm scaled by the step's noise; the
loss is divided by the step's length, which the gradient through the mean brings along.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from verst.algorithms.base import Policies
from verst.algorithms.flow_grpo import FlowGrpo, PolicyLoss, policy_loss
from verst.algorithms.pairs import Tile
from verst.config.algorithms import GrpoGuardConfig
from verst.config.sections import SamplingConfig
from verst.flow.transitions import LogProbReduction


def guarded_loss(
    log_prob: Float[Tensor, " B"],
    old_log_prob: Float[Tensor, " B"],
    advantage: Float[Tensor, " B"],
    *,
    mean: Float[Tensor, "B ..."],
    old_mean: Float[Tensor, "B ..."],
    std: Float[Tensor, " B"],
    dt: Float[Tensor, " B"],
    clip_low: float,
    clip_high: float,
    reduction: LogProbReduction = "mean",
) -> PolicyLoss:
    """max(-A rho, -A clip(rho)) / |dt| with rho = exp((log_prob - old_log_prob + b) n) per pair (eq. 8).

    n = std of the transition, b = (mu - mu_old)^2 / (2 n^2), reduced over elements as the log-probs are.
    """
    squared = ((mean - old_mean) ** 2).flatten(1)
    distance = squared.mean(dim=1) if reduction == "mean" else squared.sum(dim=1)
    change = (log_prob - old_log_prob + distance / (2 * std**2)) * std
    out = policy_loss(change, torch.zeros_like(change), advantage, clip_low=clip_low, clip_high=clip_high)
    return out._replace(loss=out.loss / dt.abs())


class GrpoGuard(FlowGrpo):
    """The old means are those of the live policy before the first optimizer step on a rollout: what sampled it."""

    def __init__(self, config: GrpoGuardConfig, *, sampling: SamplingConfig, seed: int) -> None:
        super().__init__(config, sampling=sampling, seed=seed)
        self.old = "start"

    def stream_loss(self, name: str, tile: Tile, new: Tensor, old: Tensor, policies: Policies) -> PolicyLoss:
        """See FlowGrpo.stream_loss."""
        step, before = policies.distribution(tile)[name], policies.distribution(tile, "old")[name]
        return guarded_loss(
            new,
            old,
            tile.advantages,
            mean=step.mean,
            old_mean=before.mean,
            std=step.std.flatten(1).mean(dim=1),
            dt=tile.next_sigmas[name] - tile.sigmas[name],
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
            reduction=self._reduction,
        )
