"""What the trainer and an algorithm know of each other.

An algorithm says how one scored group becomes pairs (in the driver) and what the loss of a tile of pairs is (in the
trainer). It sees policies only through `Policies`; masks, means, optimizer steps and weights are the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from verst.algorithms.pairs import PairBlock, Tile, level_seed, noised_block, pair_block
from verst.config.algorithms import AlgorithmBase
from verst.flow.transitions import StepDistribution
from verst.types import Conditioning, Group, Latents, Microgroup, Sample

Role = Literal["live", "old", "reference"]
"""The trained policy; the one that sampled; the one that a KL is taken to."""


@runtime_checkable
class Policies(Protocol):
    """The policies that a loss compares. Only `live` has gradients."""

    def velocity(self, tile: Tile, role: Role = "live") -> Latents:
        """stream -> [B, ...] fp32 at the tile's latents and sigmas, with the recipe's guidance.

        One forward for each role, however often it is asked for.
        """

    def distribution(self, tile: Tile, role: Role = "live") -> dict[str, StepDistribution]:
        """stream -> the distribution of each pair's next latent under the recipe's transition, from `velocity`."""


@dataclass(frozen=True, kw_only=True)
class PairLosses:
    """Of one tile."""

    loss: Tensor
    """[B], one a pair; the trainer leaves masked pairs out and takes the mean over the whole optimizer step."""
    means: Mapping[str, Tensor] = field(default_factory=dict)
    """metric name (without `policy/`) -> [B]: reported as the mean over all pairs of a rollout."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """metric name -> [B]: reported as the largest over the pairs of the FIRST optimizer step, before any update."""


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """All samples of one prompt with what their rewards made of them, in the order of `group.samples`."""

    group: Group
    advantages: tuple[float, ...]
    mask: tuple[bool, ...]
    """False: no finite reward; such a sample must not be trained on."""


@dataclass(frozen=True, kw_only=True)
class Follows:
    """An old policy that samples, and after each rollout moves to the live one."""

    flat: int
    """Rollouts in which it is the live one."""
    ramp: float
    """Growth of its decay a rollout after that."""
    largest: float
    """Largest decay."""

    def decay(self, rollout: int) -> float:
        """Decay after rollout number `rollout` (from 0): min(ramp * (rollout - flat), largest), at least 0.

        0 makes the old policy the live one. The schedules of DiffusionNFT are (0, 0.001, 0.5) and (75, 0.0075, 0.999).
        """
        return min(max(self.ramp * (rollout - self.flat), 0.0), self.largest)


OldPolicy = Literal["none", "start"] | Follows
"""none: an algorithm never asks for it. start: the live weights as they were before the first optimizer step on a
rollout. Follows: weights of their own, which also sample."""


@runtime_checkable
class Algorithm(Protocol):
    old: OldPolicy

    def blocks(self, group: ScoredGroup) -> list[PairBlock]:
        """The pairs of one group; none where it has nothing to teach. All blocks of a run have one number of samples."""

    def loss(self, tile: Tile, policies: Policies) -> PairLosses:
        """Of one tile, with gradients in the live policy."""


def microgroups_of(group: ScoredGroup) -> list[tuple[Microgroup, tuple[float, ...], tuple[bool, ...]]]:
    """Each microgroup with its samples' advantages and masks."""
    parts, done = [], 0
    for microgroup in group.group.microgroups:
        rows = slice(done, done + len(microgroup.samples))
        parts.append((microgroup, group.advantages[rows], group.mask[rows]))
        done = rows.stop
    return parts


def rows_of(group: ScoredGroup, index: int) -> tuple[Sample, Conditioning]:
    """One sample of a group, and its row of what the model was told."""
    rows = [(microgroup, row) for microgroup in group.group.microgroups for row in range(len(microgroup.samples))]
    microgroup, row = rows[index]
    return microgroup.samples[row], microgroup.conditioning.rows(slice(row, row + 1))


def recorded_blocks(group: ScoredGroup, *, keep_all: bool) -> list[PairBlock]:
    """One block a microgroup: its recorded stochastic steps.

    A microgroup without an advantage has no gradient and is left out unless `keep_all` (a KL gives it one).
    """
    return [
        pair_block(microgroup, advantages=values, mask=mask)
        for microgroup, values, mask in microgroups_of(group)
        if any(mask) and (any(values) or keep_all)
    ]


def noised_blocks(group: ScoredGroup, *, keep_all: bool, fraction: float, seed: int) -> list[PairBlock]:
    """The same with noised clean samples (see `noised_block`); noise follows from run seed and sample alone."""
    return [
        noised_block(
            microgroup.samples,
            microgroup.conditioning,
            advantages=values,
            mask=mask,
            fraction=fraction,
            seeds=[level_seed(seed, sample.key) for sample in microgroup.samples],
        )
        for microgroup, values, mask in microgroups_of(group)
        if any(mask) and (any(values) or keep_all)
    ]


def over_streams(config: AlgorithmBase, values: Mapping[str, Tensor]) -> Tensor:
    """[B]: the streams' values, each times its weight of the recipe, added up."""
    weights = {str(stream): weight for stream, weight in config.stream_weights.items()}
    return total([weights.get(name, 1.0) * value for name, value in values.items()])


def total(values: Sequence[Tensor]) -> Tensor:
    """[B]: the streams' values, pair by pair."""
    return torch.stack(list(values)).sum(dim=0)


def largest(values: Sequence[Tensor]) -> Tensor:
    """[B]: the largest of the streams' values, pair by pair."""
    return torch.stack(list(values)).amax(dim=0)


def mean_square(x: Tensor) -> Tensor:
    """[B]: mean of squares over a row's elements."""
    return (x.flatten(1) ** 2).mean(dim=1)


def velocity_kl(config: AlgorithmBase, tile: Tile, policies: Policies, role: Role) -> Tensor:
    """[B]: mean squared velocity difference to another policy, over streams; a KL up to a factor of the noise level."""
    velocity, other = policies.velocity(tile), policies.velocity(tile, role)
    return over_streams(config, {name: mean_square(v - other[name]) for name, v in velocity.items()})
