"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO with a ratio of equal mean and spread at all noise levels.

The ratio of a step is biased below 1 by the move of its mean, and moves more the less noise the step has; then the clip
holds back some steps and never others. Here the bias is added back and the logarithm scaled by the step's noise; the
loss is divided by the step's length, which the gradient through the mean brings along.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from verst.algorithms.base import (
    OldPolicy,
    PairLosses,
    Policies,
    ScoredGroup,
    largest,
    over_streams,
    recorded_blocks,
)
from verst.algorithms.flow_grpo import PolicyLoss, policy_loss, transition_kl
from verst.algorithms.pairs import PairBlock, Tile, joint_log_prob
from verst.config.algorithms import GrpoGuardConfig
from verst.config.sections import SamplingConfig
from verst.flow.transitions import LogProbReduction, StepDistribution


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


class GrpoGuard:
    """The old means are those of the live policy before the first optimizer step on a rollout: what sampled it."""

    def __init__(self, config: GrpoGuardConfig, *, sampling: SamplingConfig, seed: int) -> None:
        del seed
        self._config = config
        self._reduction: LogProbReduction = sampling.log_prob_reduction
        self.old: OldPolicy = "start"

    def blocks(self, group: ScoredGroup) -> list[PairBlock]:
        """See Algorithm.blocks."""
        return recorded_blocks(group, keep_all=self._config.kl_beta > 0)

    def loss(self, tile: Tile, policies: Policies) -> PairLosses:
        """See Algorithm.loss."""
        config = self._config
        steps, before = policies.distribution(tile), policies.distribution(tile, "old")
        new = joint_log_prob(steps, tile, reduction=self._reduction)
        old = tile.old_log_probs
        if config.old_log_probs == "recompute":
            old = joint_log_prob(before, tile, reduction=self._reduction)
        parts = {name: self._stream(name, tile, new[name], old[name], steps, before) for name in new}
        loss = over_streams(config, {name: part.loss for name, part in parts.items()})
        means = {"clip_fraction": largest([part.clipped for part in parts.values()])}
        if config.kl_beta > 0:
            kl = transition_kl(config, tile, policies)
            loss, means["kl"] = loss + config.kl_beta * kl, kl.detach()
        maxima = {
            "ratio_max_deviation": largest([(part.ratio.detach() - 1).abs() for part in parts.values()]),
            "log_prob_max_difference": largest([(new[name].detach() - old[name]).abs() for name in new]),
        }
        return PairLosses(loss=loss, means=means, maxima=maxima)

    def _stream(
        self,
        name: str,
        tile: Tile,
        new: Tensor,
        old: Tensor,
        steps: Mapping[str, StepDistribution],
        before: Mapping[str, StepDistribution],
    ) -> PolicyLoss:
        return guarded_loss(
            new,
            old,
            tile.advantages,
            mean=steps[name].mean,
            old_mean=before[name].mean,
            std=steps[name].std.flatten(1).mean(dim=1),
            dt=tile.next_sigmas[name] - tile.sigmas[name],
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
            reduction=self._reduction,
        )
