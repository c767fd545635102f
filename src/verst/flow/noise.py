"""Noise that depends on (run seed, rollout, group, index) alone: never on worker count, batch mates or order."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a path of numbers and words, e.g. `derive_seed(run_seed, "sample", rollout, group, index)`.

    A hash, not a sum: neighbouring samples of neighbouring runs never share a seed by arithmetic.
    """
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


DrawNoise = Callable[[Sequence[int]], Tensor]
"""One sample's latent shape -> [B, *shape] fp32, new at every call."""


class SampleNoise:
    """One random generator for each sample of a batch; draws of different samples never mix.

    A sample's generator first draws the initial latents, stream by stream, and then one fp32 tensor for each
    stochastic step of the first stream: the order of diffusers' pipelines and of SGLang-Diffusion's controller. The
    steps of every other stream have a generator of their own, so that whether one stream is stochastic never changes
    the noise of another. `initial_seeds` (a group that shares its starting noise) takes the initial latents from
    generators of their own instead; the step noise then is the first draw of the sample's generator.
    """

    def __init__(
        self, seeds: Sequence[int], *, device: torch.device | str = "cpu", initial_seeds: Sequence[int] | None = None
    ) -> None:
        """seeds: one a sample. Raises ValueError when `initial_seeds` has another length."""
        self._seeds = tuple(seeds)
        self._device = torch.device(device)
        self._generators = self._seeded(seeds)
        self._initial = self._generators
        if initial_seeds is not None:
            if len(initial_seeds) != len(seeds):
                raise ValueError(f"{len(initial_seeds)} initial seeds for {len(seeds)} samples")
            self._initial = self._seeded(initial_seeds)

    def initial(self, shape: Sequence[int]) -> Tensor:
        """[B, *shape] fp32; drawn once for each stream in the family's order, before any step."""
        return _draw(self._initial, shape)

    def steps(self, stream: str, *, first: bool = True) -> DrawNoise:
        """What draws the noise of a stream's stochastic steps. first: it is the first stream of the family."""
        generators = self._generators
        if not first:
            generators = self._seeded([derive_seed(seed, "stream", stream) for seed in self._seeds])
        return functools.partial(_draw, generators)

    def _seeded(self, seeds: Sequence[int]) -> list[torch.Generator]:
        return [torch.Generator(self._device).manual_seed(seed) for seed in seeds]


def _draw(generators: Sequence[torch.Generator], shape: Sequence[int]) -> Tensor:
    rows = [torch.randn((1, *shape), generator=g, device=g.device, dtype=torch.float32) for g in generators]
    return torch.cat(rows)
