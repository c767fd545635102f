"""(sample, step) pairs: what a rollout leaves for training, and how pairs are cut into tiles.

A block holds one microgroup's pairs; a tile takes rows of blocks. A tile of exactly one microgroup at one step has
the engine's own batch geometry, and then the ratio before an update is exactly 1.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verst.config.algorithms import num_levels
from verst.flow import transitions
from verst.flow.noise import derive_seed
from verst.flow.transitions import LogProbReduction, StepDistribution
from verst.types import Conditioning, Latents, Microgroup, Sample, SampleKey, join_conditioning, stack_rows


@dataclass(frozen=True, kw_only=True)
class PairBlock:
    """The trained steps of one microgroup of m samples; S steps."""

    latents: Latents
    """stream -> [S, m, ...], as stored: x entering each step."""
    next_latents: Latents
    """stream -> [S, m, ...], as stored: what the step led to."""
    sigmas: dict[str, Tensor]
    """stream -> fp32, [S] where all samples share their steps, else [S, m]."""
    next_sigmas: dict[str, Tensor]
    """stream -> fp32, like sigmas."""
    first_sigmas: dict[str, Tensor]
    """stream -> scalar fp32, sigma_1 of the grid."""
    old_log_probs: dict[str, Tensor]
    """stream -> [S, m] fp32, from the rollout."""
    advantages: Tensor
    """[m] fp32."""
    mask: Tensor
    """[m] bool: False where the sample's reward failed or was not finite."""
    conditioning: Conditioning

    @property
    def num_steps(self) -> int:
        return len(next(iter(self.sigmas.values())))

    @property
    def num_samples(self) -> int:
        return len(self.advantages)

    @property
    def num_pairs(self) -> int:
        """Pairs that count in the loss."""
        return self.num_steps * int(self.mask.sum())

    def masked(self) -> PairBlock:
        """The same block with weight 0, to keep ranks in step."""
        return replace(self, mask=torch.zeros_like(self.mask))


def pair_block(microgroup: Microgroup, *, advantages: Sequence[float], mask: Sequence[bool]) -> PairBlock:
    """The pairs of a scored microgroup at its stochastic steps."""
    samples = microgroup.samples
    streams = samples[0].streams
    steps = {name: trajectory.sde_step_indices for name, trajectory in streams.items()}

    def stack(name: str, shift: int) -> Tensor:
        rows = [[s.streams[name].latent_at(i + shift) for s in samples] for i in steps[name]]
        return stack_rows([stack_rows(row) for row in rows])

    return PairBlock(
        latents={name: stack(name, 0) for name in streams},
        next_latents={name: stack(name, 1) for name in streams},
        sigmas={name: t.sigmas[list(steps[name])] for name, t in streams.items()},
        next_sigmas={name: t.sigmas[[i + 1 for i in steps[name]]] for name, t in streams.items()},
        first_sigmas={name: t.sigmas[1] for name, t in streams.items()},
        old_log_probs={
            name: torch.stack([s.streams[name].log_probs[list(steps[name])] for s in samples], dim=1)
            for name in streams
        },
        advantages=torch.tensor(advantages, dtype=torch.float32),
        mask=torch.tensor(mask, dtype=torch.bool),
        conditioning=microgroup.conditioning,
    )


def noised_block(
    samples: Sequence[Sample],
    conditioning: Conditioning,
    *,
    advantages: Sequence[float],
    mask: Sequence[bool],
    fraction: float,
    seeds: Sequence[int],
) -> PairBlock:
    """Pairs of clean samples and noise levels, for algorithms that need no recorded steps.

    Each sample draws `fraction` of the rollout's grid (at least one level), and noise, from its own of `seeds`: two
    samples with one seed share both. `latents` are x_t = (1 - t) x0 + t eps and `next_latents` the clean x0; streams
    share their step, each with its own sigma.
    """
    num_steps = len(next(iter(samples[0].streams.values())).sigmas) - 1
    size = num_levels(num_steps, fraction)
    latents: dict[str, list[Tensor]] = {name: [] for name in samples[0].streams}
    clean: dict[str, list[Tensor]] = {name: [] for name in samples[0].streams}
    sigmas: dict[str, list[Tensor]] = {name: [] for name in samples[0].streams}
    for sample, own in zip(samples, seeds, strict=True):
        steps = random.Random(own).sample(range(num_steps), size)
        generator = torch.Generator().manual_seed(own)
        for name, trajectory in sample.streams.items():
            x0 = trajectory.latent_at(num_steps).float()
            t = trajectory.sigmas[steps]
            eps = torch.randn((size, *x0.shape), generator=generator)
            rows = transitions.per_row(t, eps)
            latents[name].append((1 - rows) * x0 + rows * eps)
            clean[name].append(x0.expand(size, *x0.shape))
            sigmas[name].append(t)
    levels = {name: torch.stack(parts, dim=1) for name, parts in sigmas.items()}
    return PairBlock(
        latents={name: torch.stack(parts, dim=1) for name, parts in latents.items()},
        next_latents={name: torch.stack(parts, dim=1) for name, parts in clean.items()},
        sigmas=levels,
        next_sigmas={name: torch.zeros_like(level) for name, level in levels.items()},
        first_sigmas={name: t.sigmas[1] for name, t in samples[0].streams.items()},
        old_log_probs={name: torch.zeros_like(level) for name, level in levels.items()},
        advantages=torch.tensor(advantages, dtype=torch.float32),
        mask=torch.tensor(mask, dtype=torch.bool),
        conditioning=conditioning,
    )


def level_seed(seed: int, key: SampleKey) -> int:
    """The seed of a sample's noise levels and noise in training."""
    return derive_seed(seed, "levels", key.rollout, key.group, key.index)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """B pairs that go through one forward."""

    latents: Latents
    """stream -> [B, ...] fp32."""
    next_latents: Latents
    sigmas: dict[str, Tensor]
    """stream -> [B] fp32."""
    next_sigmas: dict[str, Tensor]
    first_sigmas: dict[str, Tensor]
    """stream -> scalar fp32."""
    old_log_probs: dict[str, Tensor]
    """stream -> [B] fp32."""
    advantages: Tensor
    """[B] fp32."""
    weight: Tensor
    """[B] fp32: 1 for a pair that counts, 0 for a masked one."""
    conditioning: Conditioning

    def targets(self) -> Latents:
        """stream -> eps - x0 of noised pairs, from what they hold: (x_t - x0) / t, exact to rounding / t."""
        return {
            name: (x - self.next_latents[name]) / transitions.per_row(self.sigmas[name], x)
            for name, x in self.latents.items()
        }


def joint_log_prob(
    steps: Mapping[str, StepDistribution], tile: Tile, *, reduction: LogProbReduction = "mean"
) -> dict[str, Tensor]:
    """stream -> [B] log-prob of the stored next latents, reduced as the engine did it."""
    return {
        name: transitions.gaussian_log_prob(tile.next_latents[name], step.mean, step.std, reduction=reduction)
        for name, step in steps.items()
    }


def tiles_of(blocks: Sequence[PairBlock], *, tile_size: int, device: torch.device) -> list[Tile]:
    """Pairs in order (block, step, sample) in tiles of `tile_size`; no tile holds part of a step and more.

    A tile never mixes latents, schedules or conditioning of unlike shape: blocks of one kind come together, kinds in the
    order in which they first appear.
    """
    kinds: dict[Hashable, list[PairBlock]] = {}
    for block in blocks:
        kinds.setdefault(_kind(block), []).append(block)
    return [tile for alike in kinds.values() for tile in _tiles_of_one_kind(alike, tile_size, device)]


def _kind(block: PairBlock) -> Hashable:
    """What all rows of a tile have in common. Token sequences (dim 1 of the conditioning) are padded where they differ."""
    sides = (block.conditioning.positive, block.conditioning.negative or {})
    return (
        block.num_samples,
        block.conditioning.geometry,
        tuple((name, x.shape[2:], float(block.first_sigmas[name])) for name, x in block.latents.items()),
        tuple(tuple((name, t.ndim, t.shape[2:]) for name, t in sorted(side.items())) for side in sides),
    )


def _tiles_of_one_kind(blocks: Sequence[PairBlock], tile_size: int, device: torch.device) -> list[Tile]:
    rows = [(block, step) for block in blocks for step in range(block.num_steps)]
    micro = blocks[0].num_samples
    if tile_size >= micro:
        per_tile = tile_size // micro
        groups = [rows[i : i + per_tile] for i in range(0, len(rows), per_tile)]
        return [_tile(group, slice(None), device) for group in groups]
    pieces = [slice(i, i + tile_size) for i in range(0, micro, tile_size)]
    return [_tile([row], piece, device) for row in rows for piece in pieces]


def _tile(rows: Sequence[tuple[PairBlock, int]], piece: slice, device: torch.device) -> Tile:
    streams = list(rows[0][0].latents)
    sizes = [len(block.advantages[piece]) for block, _ in rows]

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).to(device)

    def spread(name: str, field: str) -> Tensor:
        values = [(getattr(b, field)[name][s], n) for (b, s), n in zip(rows, sizes, strict=True)]
        return join([value[piece] if value.ndim else value.expand(n) for value, n in values])

    conditioning = join_conditioning([block.conditioning.rows(piece) for block, _ in rows])
    return Tile(
        latents={name: join([b.latents[name][s][piece] for b, s in rows]).float() for name in streams},
        next_latents={name: join([b.next_latents[name][s][piece] for b, s in rows]).float() for name in streams},
        sigmas={name: spread(name, "sigmas") for name in streams},
        next_sigmas={name: spread(name, "next_sigmas") for name in streams},
        first_sigmas={name: rows[0][0].first_sigmas[name].to(device) for name in streams},
        old_log_probs={name: join([b.old_log_probs[name][s][piece] for b, s in rows]) for name in streams},
        advantages=join([b.advantages[piece] for b, _ in rows]),
        weight=join([b.mask[piece].float() for b, _ in rows]),
        conditioning=to_device(conditioning, device),
    )


def to_device(conditioning: Conditioning, device: torch.device) -> Conditioning:
    def move(side: dict[str, Tensor]) -> dict[str, Tensor]:
        # A copy, as `join` makes one: a view of received bytes may start anywhere, and matrix kernels round otherwise
        # on memory that is not aligned as the engine's was.
        return {name: v.to(device, copy=True, memory_format=torch.contiguous_format) for name, v in side.items()}

    negative = None if conditioning.negative is None else move(conditioning.negative)
    return replace(conditioning, positive=move(conditioning.positive), negative=negative)
