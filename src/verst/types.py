"""Frozen records that cross borders between packages.

Streams are the latents of one modality (`"visual"`, `"audio"`): a record keyed by stream has one entry for each.
K counts kept latents, T the denoising steps, B the samples of a batch, `...` one sample's latent shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verst.errors import InvariantError

Latents = dict[str, Tensor]
"""stream -> [B, ...]; fp32 between steps."""


@dataclass(frozen=True, kw_only=True, order=True)
class SampleKey:
    """Where a sample stands in a run; its noise depends on this and the run's seed alone."""

    rollout: int
    group: int
    index: int


@dataclass(frozen=True, kw_only=True)
class StreamTrajectory:
    """What one sample's denoising left behind in one stream."""

    latents: Tensor
    """[K, ...] in the storage dtype: the latent ENTERING step i for each kept i; index T is the final latent."""
    latent_step_indices: Tensor
    """[K] int64, ascending, each in 0..T."""
    sigmas: Tensor
    """[T+1] fp32, the whole grid, 1 first and 0 last."""
    timesteps: Tensor
    """[T+1] fp32, what the model was fed; last entry 0."""
    log_probs: Tensor
    """[T] fp32, mean over elements of log p(x_{i+1} | x_i); 0 on deterministic steps."""
    sde_step_indices: tuple[int, ...]
    """Steps that were stochastic, ascending."""

    def latent_at(self, step: int) -> Tensor:
        """The latent entering `step` (T: the final one). KeyError where it was not kept."""
        hits = (self.latent_step_indices == step).nonzero()
        if len(hits) != 1:
            raise KeyError(f"latent of step {step} was not kept (kept: {self.latent_step_indices.tolist()})")
        return self.latents[int(hits[0])]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One generated sample, as the engine made it."""

    key: SampleKey
    prompt: str
    seed: int
    initial_seed: int
    weight_version: int
    """The weights that made it: -1 before the first sync."""
    media: Tensor
    """uint8 [F, H, W, 3], RGB; F = 1 for an image, 0 where the request wanted no media."""
    fps: float | None
    streams: dict[str, StreamTrajectory]
    audio: Tensor | None = None
    """fp32 [channels, n] in [-1, 1]; None from a family without sound."""
    sample_rate: int | None = None
    """Audio samples a second."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Size of what is made; requests of equal geometry may share a batch."""

    height: int
    """Pixels."""
    width: int
    """Pixels."""
    num_frames: int = 1
    fps: float | None = None
    """Frames a second; None for an image."""


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """What the transformer was told besides latents and noise level; rows follow the samples of a microgroup."""

    positive: dict[str, Tensor]
    """name -> [B, ...]"""
    negative: dict[str, Tensor] | None
    """The unconditional side, with guidance only."""
    geometry: Geometry | None = None
    """Of all rows."""

    def rows(self, index: Tensor | slice) -> Conditioning:
        negative = None if self.negative is None else {k: v[index] for k, v in self.negative.items()}
        positive = {k: v[index] for k, v in self.positive.items()}
        return Conditioning(positive=positive, negative=negative, geometry=self.geometry)


def join_rows(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Rows of several conditionings as one batch: name -> [sum of B, ...].

    Token sequences (dim 1) of unlike length are padded with zeros at the end; a family whose model sees padding
    carries a mask, whose padding is 0 = not there. Raises InvariantError for rows of another kind (condition images of
    another number or size).
    """
    kinds = [{name: tuple(tensor.shape[2:]) for name, tensor in part.items()} for part in parts]
    if any(kind != kinds[0] for kind in kinds):
        unlike = sorted({name for kind in kinds for name in kind if any(k.get(name) != kind[name] for k in kinds)})
        raise InvariantError(
            f"{', '.join(unlike)} of these rows differ, so they cannot be one batch: let the prompts of a batch have "
            "condition images of one number and size, or one prompt a batch"
        )
    return {name: _cat_padded([part[name] for part in parts]) for name in parts[0]}


def join_conditioning(parts: Sequence[Conditioning]) -> Conditioning:
    """All rows of conditionings of one geometry, in order, each in memory of its own.

    Rows that only repeat one in memory, as an engine's answer has them, go through other kernels than an engine's batch
    and come out with other last bits in half precision.
    """
    if len(parts) == 1:
        (part,) = parts
        negative = None if part.negative is None else _in_memory(part.negative)
        return replace(part, positive=_in_memory(part.positive), negative=negative)
    negatives = [part.negative for part in parts if part.negative is not None]
    return Conditioning(
        positive=join_rows([part.positive for part in parts]),
        negative=join_rows(negatives) if negatives else None,
        geometry=parts[0].geometry,
    )


def _in_memory(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.contiguous() for name, value in rows.items()}


def stack_rows(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, without a copy where the tensors lie at equal distances in memory, as those of an answer do.

    The result then is a view of them, and holds them.
    """
    first = tensors[0]
    size, start = first.element_size(), first.data_ptr()
    step = tensors[1].data_ptr() - start if len(tensors) > 1 else 0
    regular = step > 0 and step % size == 0 and size in _INTEGERS and first.device.type == "cpu"
    if not regular or any(
        (t.dtype, t.shape, t.stride(), t.device) != (first.dtype, first.shape, first.stride(), first.device)
        or t.data_ptr() != start + i * step
        for i, t in enumerate(tensors)
    ):
        return torch.stack(list(tensors))
    return torch.from_numpy(np.asarray(_Rows(tensors, step))).view(first.dtype)


class _Rows:
    """Tensors at equal distances, as numpy reads memory that is not its own."""

    def __init__(self, tensors: Sequence[Tensor], step: int) -> None:
        self._tensors = tensors
        first, size = tensors[0], tensors[0].element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": (len(tensors), *first.shape),
            "strides": (step, *(n * size for n in first.stride())),
            "typestr": _INTEGERS[size],
            "data": (first.data_ptr(), False),
        }


_INTEGERS = {n: np.dtype(f"i{n}").str for n in (1, 2, 4, 8)}
"""Bytes of an element -> the type that stands for all of that size."""


def _cat_padded(tensors: Sequence[Tensor]) -> Tensor:
    longest = max((t.shape[1] for t in tensors if t.ndim > 1), default=0)
    padded = [
        torch.cat([t, t.new_zeros((len(t), longest - t.shape[1], *t.shape[2:]))], dim=1)
        if t.ndim > 1 and t.shape[1] < longest
        else t
        for t in tensors
    ]
    return torch.cat(padded)


@dataclass(frozen=True, kw_only=True)
class Microgroup:
    """m samples that one engine request made together, in one batch of the transformer."""

    samples: tuple[Sample, ...]
    conditioning: Conditioning
    echo: dict[str, Any]
    """Sampling parameters that the engine says it used."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Rewards of the samples of one microgroup, in their order."""

    by_reward: dict[str, tuple[float, ...]]
    """reward name -> one value a sample; NaN where the reward failed or was not finite (masked, never 0). A reward that
    does not apply to the samples' prompt has no entry: the others decide alone."""
    num_failures: int = 0
    """Scores that a reward failed to give for good, masked by policy."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """All samples of one prompt in one rollout, complete, in index order."""

    rollout: int
    index: int
    prompt: str
    microgroups: tuple[Microgroup, ...]
    scores: tuple[Scores, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the prompt's row."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for microgroup in self.microgroups for sample in microgroup.samples)

    @property
    def weight_version(self) -> int:
        """The weights that made it."""
        return self.microgroups[0].samples[0].weight_version

    def rewards(self) -> dict[str, tuple[float, ...]]:
        """reward name -> one value a sample, in the order of `samples`."""
        names = self.scores[0].by_reward
        return {name: tuple(v for s in self.scores for v in s.by_reward[name]) for name in names}
