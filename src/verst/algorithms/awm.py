"""AWM, advantage-weighted matching (arXiv 2509.25050): the flow-matching error as the log-likelihood of own samples.

It needs only the clean samples x0 of a rollout by any sampler. Weighting the error itself by A would be unbounded for
A < 0: pushing the velocity away from the target pays without end. In the paper's surrogate the error stands in an
exponent, so that the loss of a bad sample ends at 0, or earlier at the clip.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from verst.algorithms.base import (
    Follows,
    OldPolicy,
    PairLosses,
    Policies,
    ScoredGroup,
    largest,
    noised_blocks,
    over_streams,
    velocity_kl,
)
from verst.algorithms.flow_grpo import PolicyLoss, policy_loss
from verst.algorithms.pairs import PairBlock, Tile
from verst.algorithms.sft import matching_error
from verst.config.algorithms import AwmConfig
from verst.config.sections import SamplingConfig

Weighting = Literal["uniform", "sigma", "sigma_squared", "ghuber"]
_TINY = 1e-10


def weighted_error(
    v: Float[Tensor, "B ..."],
    target: Float[Tensor, "B ..."],
    sigma: Float[Tensor, " B"],
    *,
    weighting: Weighting,
    power: float = 0.25,
) -> Float[Tensor, " B"]:
    """e = w(sigma) mean((v - target)^2) per pair, or sigma ((m + 1e-10)^p - 1e-10^p) / p of that mean m (`ghuber`)."""
    error = matching_error(v, target)
    if weighting == "ghuber":
        return ((error + _TINY) ** power - _TINY**power) * sigma / power
    return error * {"uniform": sigma**0, "sigma": sigma, "sigma_squared": sigma**2}[weighting]


def awm_loss(
    error: Float[Tensor, " B"],
    old_error: Float[Tensor, " B"],
    advantage: Float[Tensor, " B"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) per pair, rho = exp(e_old - e): -e is the log-likelihood."""
    return policy_loss(-error, -old_error, advantage, clip_low=clip_low, clip_high=clip_high)


class Awm:
    """The old policy samples; `kl_old` holds the live one near it, `kl_beta` near a reference."""

    def __init__(self, config: AwmConfig, *, sampling: SamplingConfig, seed: int) -> None:
        del sampling
        self._config = config
        self._seed = seed
        follows = config.old_decay > 0 and config.old_ramp > 0
        schedule = Follows(flat=config.old_flat, ramp=config.old_ramp, largest=config.old_decay)
        self.old: OldPolicy = schedule if follows else "start"

    def blocks(self, group: ScoredGroup) -> list[PairBlock]:
        """See Algorithm.blocks."""
        config = self._config
        keep_all = config.kl_beta > 0 or config.kl_old > 0
        return noised_blocks(group, keep_all=keep_all, fraction=config.timestep_fraction, seed=self._seed)

    def loss(self, tile: Tile, policies: Policies) -> PairLosses:
        """See Algorithm.loss."""
        config, targets = self._config, tile.targets()
        new, old = (
            {
                name: weighted_error(
                    v, targets[name], tile.sigmas[name], weighting=config.weighting, power=config.ghuber_power
                )
                for name, v in velocity.items()
            }
            for velocity in (policies.velocity(tile), policies.velocity(tile, "old"))
        )
        parts = {
            name: awm_loss(new[name], old[name], tile.advantages, clip_low=config.clip_low, clip_high=config.clip_high)
            for name in new
        }
        loss = over_streams(config, {name: part.loss for name, part in parts.items()})
        distance = velocity_kl(config, tile, policies, "old")
        means = {
            "matching_error": over_streams(config, {name: error.detach() for name, error in new.items()}),
            "clip_fraction": largest([part.clipped for part in parts.values()]),
            "old_distance": distance.detach(),
        }
        loss = loss + config.kl_old * distance
        if config.kl_beta > 0:
            kl = velocity_kl(config, tile, policies, "reference")
            loss, means["kl"] = loss + config.kl_beta * kl, kl.detach()
        return PairLosses(loss=loss, means=means)
