"""Online SFT: flow matching on the model's own best samples (reward-filtered, as in RAFT, arXiv 2304.06767)."""

from __future__ import annotations

import math

from verst.algorithms.base import (
    OldPolicy,
    PairLosses,
    Policies,
    ScoredGroup,
    over_streams,
    rows_of,
    velocity_kl,
)
from verst.algorithms.pairs import PairBlock, Tile, level_seed, noised_block
from verst.algorithms.sft import matching_error
from verst.config.algorithms import OnlineSftConfig
from verst.config.sections import SamplingConfig


class OnlineSft:
    """What is kept counts alike, whatever its advantage."""

    def __init__(self, config: OnlineSftConfig, *, sampling: SamplingConfig, seed: int) -> None:
        del sampling
        self._config = config
        self._seed = seed
        self.old: OldPolicy = "none"

    def blocks(self, group: ScoredGroup) -> list[PairBlock]:
        """One block for each kept sample, in the group's order."""
        return [self._block(group, index) for index in self.kept(group)]

    def kept(self, group: ScoredGroup) -> list[int]:
        """Which samples are trained on."""
        scored = [index for index, scored in enumerate(group.mask) if scored]
        size = math.ceil(len(scored) * self._config.keep_fraction)
        best = sorted(scored, key=lambda index: -group.advantages[index])[:size]
        return sorted(index for index in best if group.advantages[index] > self._config.min_advantage)

    def _block(self, group: ScoredGroup, index: int) -> PairBlock:
        sample, conditioning = rows_of(group, index)
        return noised_block(
            [sample],
            conditioning,
            advantages=[group.advantages[index]],
            mask=[True],
            fraction=self._config.timestep_fraction,
            seeds=[level_seed(self._seed, sample.key)],
        )

    def loss(self, tile: Tile, policies: Policies) -> PairLosses:
        """See Algorithm.loss."""
        config, targets = self._config, tile.targets()
        errors = {name: matching_error(v, targets[name]) for name, v in policies.velocity(tile).items()}
        loss = over_streams(config, errors)
        means = {"matching_error": loss.detach()}
        if config.kl_beta > 0:
            kl = velocity_kl(config, tile, policies, "reference")
            loss, means["kl"] = loss + config.kl_beta * kl, kl.detach()
        return PairLosses(loss=loss, means=means)
