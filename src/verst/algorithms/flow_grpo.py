"""Flow-GRPO (arXiv 2505.05470): the clipped policy gradient over recorded denoising steps.

Samples of older weights are weighed by a truncated ratio to the policy that made them, apart from the clip, which is
about the policy before the update: decoupled PPO (arXiv 2110.00641; for asynchronous runs 2505.24298). With other
transitions and step strategies of the recipe it is DanceGRPO (`dance`), MixGRPO (`sliding`) and Flow-GRPO-Fast (`branch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
from verst.algorithms.pairs import PairBlock, Tile, joint_log_prob
from verst.config.algorithms import ClippedRatio
from verst.config.sections import SamplingConfig
from verst.flow import transitions
from verst.flow.transitions import StepDistribution


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


def importance_weights(
    old_log_prob: Float[Tensor, " B"], rollout_log_prob: Float[Tensor, " B"], *, cap: float
) -> Float[Tensor, " B"]:
    """min(cap, exp(old_log_prob - rollout_log_prob)) per pair: what a sample of another policy counts for the old one.

    Truncation bounds the variance for a bias, as rho-bar of V-trace does (arXiv 1802.01561, eq. 1).
    """
    return torch.exp(old_log_prob - rollout_log_prob).clamp(max=cap)


class FlowGrpo:
    """The clipped ratio on recorded steps, with an optional KL to a reference."""

    def __init__(self, config: ClippedRatio, *, sampling: SamplingConfig, seed: int) -> None:
        del seed
        self._config = config
        self._reduction = sampling.log_prob_reduction
        self.old: OldPolicy = "start" if config.old_log_probs == "recompute" else "none"

    def blocks(self, group: ScoredGroup) -> list[PairBlock]:
        """See Algorithm.blocks."""
        return recorded_blocks(group, keep_all=self._config.kl_beta > 0)

    def loss(self, tile: Tile, policies: Policies) -> PairLosses:
        """See Algorithm.loss."""
        config = self._config
        new = joint_log_prob(policies.distribution(tile), tile, reduction=self._reduction)
        old = tile.old_log_probs
        if config.old_log_probs == "recompute":
            old = joint_log_prob(policies.distribution(tile, "old"), tile, reduction=self._reduction)
        parts = {name: self.stream_loss(name, tile, new[name], old[name], policies) for name in new}
        losses = {name: part.loss for name, part in parts.items()}
        means = {"clip_fraction": largest([part.clipped for part in parts.values()])}
        if config.importance_cap is not None:
            cap = config.importance_cap
            weights = {name: importance_weights(old[name], tile.old_log_probs[name], cap=cap) for name in old}
            losses = {name: weights[name] * value for name, value in losses.items()}
            means["importance_weight"] = largest(list(weights.values()))
            means["importance_capped"] = largest([(weight >= cap).to(weight.dtype) for weight in weights.values()])
        loss = over_streams(config, losses)
        if config.kl_beta > 0:
            kl = transition_kl(config, tile, policies)
            loss, means["kl"] = loss + config.kl_beta * kl, kl.detach()
        maxima = {
            "ratio_max_deviation": largest([(part.ratio.detach() - 1).abs() for part in parts.values()]),
            "log_prob_max_difference": largest([(new[name].detach() - old[name]).abs() for name in new]),
        }
        return PairLosses(loss=loss, means=means, maxima=maxima)

    def stream_loss(self, name: str, tile: Tile, new: Tensor, old: Tensor, policies: Policies) -> PolicyLoss:
        """Of one stream, from its log-probs: [B] now and in the rollout."""
        config = self._config
        return policy_loss(new, old, tile.advantages, clip_low=config.clip_low, clip_high=config.clip_high)


def transition_kl(config: ClippedRatio, tile: Tile, policies: Policies) -> Tensor:
    """[B] KL to the reference with the transition's own std, over streams; gradients in the policy only."""
    steps: Mapping[str, StepDistribution] = policies.distribution(tile)
    reference = policies.distribution(tile, "reference")

    def of_stream(name: str) -> Tensor:
        std = steps[name].std
        if config.kl_form == "no_dt":
            dt = tile.next_sigmas[name] - tile.sigmas[name]
            std = std / transitions.per_row(torch.sqrt(-dt), steps[name].mean)
        return transitions.gaussian_kl(steps[name].mean, reference[name].mean, std)

    return over_streams(config, {name: of_stream(name) for name in steps})
