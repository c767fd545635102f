"""Tensors brought to where they are kept: copied, rounded, digested and checked, on a GPU in one pass over the bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verst.weights import digest as d

_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_HALVES)


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """In as few launches as the devices and dtypes allow."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


@dataclass(frozen=True, kw_only=True)
class Filled:
    """Of each place, in order, on the places' device: nobody has waited for it yet."""

    digests: Tensor
    """[n] int64, `word_digests` of what was written."""
    broken: Tensor
    """[n] int64: not 0 where it is not finite. Empty unless it was asked for."""


class Filler:
    """Places that stay, to be filled again and again: the table of their segments is made once.

    On a GPU with Triton the digest is of the words as the kernel writes them; elsewhere the places are read again.
    """

    def __init__(self, places: Sequence[Tensor]) -> None:
        """One device; contiguous or not."""
        self._places = list(places)
        self._routes: tuple[tuple[object, ...], list[_Route]] | None = None

    @torch.no_grad()
    def fill(self, sources: Sequence[Tensor], *, check: bool = False) -> Filled:
        """sources: as many, of the places' shapes, any dtype and device. check: find what is not finite, too."""
        if not self._places or not d.has_kernel(self._places[0].device):
            copy_all(self._places, sources)
            good = are_finite(self._places) if check else []
            return Filled(digests=d.word_digests(self._places), broken=torch.tensor([not fine for fine in good]).long())
        return self._by_kernel(sources, check=check)

    def _by_kernel(self, sources: Sequence[Tensor], *, check: bool) -> Filled:
        from verst.weights import words_triton

        count, device = len(self._places), self._places[0].device
        both = torch.zeros(2 * count, dtype=torch.int64, device=device)
        sums, broken = both.split(count)
        done: set[int] = set()
        for route in self._routes_of(sources):
            words_triton.run(
                route.plan,
                keys=d.segment_keys(device),
                segment=d.SEGMENT,
                sums=sums,
                broken=broken,
                sources=route.sources,
                rounded_to=route.rounded_to,
                finite_as=route.dtype if check and route.dtype in _FLOATS else None,
            )
            done.update(route.members)
        # Half words, strided memory, other devices.
        rest = [index for index in range(count) if index not in done]
        if rest:
            places = [self._places[index] for index in rest]
            copy_all(places, [sources[index] for index in rest])
            sums[rest] = d.word_digests(places)
            if check:
                broken[rest] = torch.tensor([not fine for fine in are_finite(places)], device=device).long()
        return Filled(digests=sums, broken=broken if check else broken[:0])

    def _routes_of(self, sources: Sequence[Tensor]) -> list[_Route]:
        """The kernel's launches; the same ones while neither side's memory has moved."""
        key = tuple((s.data_ptr(), s.dtype, p.data_ptr()) for s, p in zip(sources, self._places, strict=True))
        if self._routes is None or self._routes[0] != key:
            self._routes = (key, self._make_routes(sources))
        return self._routes[1]

    def _make_routes(self, sources: Sequence[Tensor]) -> list[_Route]:
        device = self._places[0].device
        groups: dict[tuple[torch.dtype, torch.dtype | None], list[int]] = {}
        for index, (source, place) in enumerate(zip(sources, self._places, strict=True)):
            rounds = source.dtype == torch.float32 and place.dtype in _HALVES
            plain = source.is_contiguous() and place.is_contiguous() and source.device == device
            aligned = d.is_whole_words(place) and source.data_ptr() % 4 == 0
            if plain and aligned and (rounds or source.dtype == place.dtype):
                groups.setdefault((place.dtype, place.dtype if rounds else None), []).append(index)
        return [
            _Route(
                members=members,
                dtype=dtype,
                rounded_to=rounded_to,
                plan=_segments(
                    device, tuple((i, self._places[i].data_ptr(), self._places[i].nbytes // 4) for i in members)
                ),
                sources=_addresses(
                    device,
                    tuple((sources[i].data_ptr(), self._places[i].nbytes // 4) for i in members),
                    bytes_a_word=4 if rounded_to is None else 8,
                ),
            )
            for (dtype, rounded_to), members in groups.items()
        ]


@dataclass(frozen=True, kw_only=True)
class _Route:
    """One launch: places of one dtype, from sources of one."""

    members: list[int]
    dtype: torch.dtype
    rounded_to: torch.dtype | None
    plan: d.Plan
    sources: Tensor


@functools.lru_cache(maxsize=64)
def _segments(device: torch.device, members: tuple[tuple[int, int, int], ...]) -> d.Plan:
    """members: (index of the tensor, address, words)."""
    pointers, lengths, owners, factors = d.segments_of(device, tuple((address, words) for _, address, words in members))
    indices = torch.tensor([index for index, _, _ in members], device=device)
    return pointers, lengths, indices[owners], factors


@functools.lru_cache(maxsize=64)
def _addresses(device: torch.device, spans: tuple[tuple[int, int], ...], *, bytes_a_word: int) -> Tensor:
    """[S] int64: where each segment of each source begins. spans: (address, words)."""
    bases, words = torch.tensor(spans, dtype=torch.int64).unbind(1)
    counts = (words + d.SEGMENT - 1) // d.SEGMENT
    starts = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return (torch.repeat_interleave(bases, counts) + starts * (d.SEGMENT * bytes_a_word)).to(device)


def are_finite(tensors: Sequence[Tensor], limits: Sequence[float] | None = None) -> list[bool]:
    """Of each tensor; with limits, whether its largest magnitude is within its own, too. Waits for the device."""
    # The largest magnitude of each, in few launches and one wait: NaN and infinity survive it, and half precision
    # cannot overflow in it.
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(index)
    good = [True] * len(tensors)
    for indices in by_dtype.values():
        largest = torch.stack(torch._foreach_norm([tensors[i] for i in indices], math.inf)).tolist()
        for index, value in zip(indices, largest, strict=True):
            good[index] = math.isfinite(value) and (limits is None or value <= limits[index])
    return good
