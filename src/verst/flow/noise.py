"""Noise that depends on (run seed, rollout, group, index) alone: never on worker count, batch mates or order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a path of numbers and words, e.g. `derive_seed(run_seed, "sample", rollout, group, index)`.

    A hash, not a sum: neighbouring samples of neighbouring runs never share a seed by arithmetic.
    """
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class SampleNoise:
    """One random generator for each sample of a batch; draws of different samples never mix.

    Like SGLang-Diffusion's controller, a sample's generator first draws the initial latent and then one fp32 tensor
    for each stochastic step. `initial_seeds` (a group that shares its starting noise) takes the initial latent from
    a generator of its own instead; the step noise then is the first draw of the sample's generator.
    """

    def __init__(
        self, seeds: Sequence[int], *, device: torch.device | str = "cpu", initial_seeds: Sequence[int] | None = None
    ) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._initial = self._generators
        if initial_seeds is not None:
            if len(initial_seeds) != len(seeds):
                raise ValueError(f"{len(initial_seeds)} initial seeds for {len(seeds)} samples")
            self._initial = [torch.Generator(device).manual_seed(seed) for seed in initial_seeds]

    def initial(self, shape: Sequence[int]) -> Tensor:
        """[B, *shape] fp32; drawn once, before any step."""
        return _draw(self._initial, shape)

    def step(self, shape: Sequence[int]) -> Tensor:
        """[B, *shape] fp32 for the next stochastic step."""
        return _draw(self._generators, shape)


def _draw(generators: Sequence[torch.Generator], shape: Sequence[int]) -> Tensor:
    rows = [torch.randn((1, *shape), generator=g, device=g.device, dtype=torch.float32) for g in generators]
    return torch.cat(rows)
