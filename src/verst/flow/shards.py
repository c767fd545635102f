"""Sequence parallelism for the rollout: which part of a latent a rank holds, and how the whole is put together again.

The controller draws noise and takes log-probs on the full tensor, so that every rank holds the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Shards(NamedTuple):
    """Two closures over one stream's latents [B, ...]; the batch dimension is never the one that is cut."""

    shard: Callable[[Tensor], Tensor]
    """The full tensor -> this rank's part."""
    gather: Callable[[Tensor], Tensor]
    """This rank's part -> the full tensor, the same on every rank. A collective: all ranks call it in one order."""


def shard_sizes(size: int, world_size: int) -> list[int]:
    """How many of `size` rows each rank holds: as even as can be, the first ranks one more, and 0 is allowed."""
    base, more = divmod(size, world_size)
    return [base + (rank < more) for rank in range(world_size)]


def gather_rows(local: Tensor, *, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks along `dim`, one behind the other; sizes: of each rank's part. Not differentiable."""
    padded = local
    if local.shape[dim] < max(sizes):
        shape = list(local.shape)
        shape[dim] = max(sizes) - local.shape[dim]
        padded = torch.cat([local, local.new_zeros(shape)], dim=dim)
    parts = [torch.empty_like(padded, memory_format=torch.contiguous_format) for _ in sizes]
    dist.all_gather(parts, padded.contiguous(), group=group)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, sizes, strict=True)], dim=dim)


def sequence_shards(*, size: int, dim: int, group: dist.ProcessGroup) -> Shards:
    """Shards of `size` rows along `dim` (counted with the batch dimension, at least 1) over the ranks of `group`.

    Sizes need not divide: the gather pads to the largest part and trims. Raises ValueError for dim < 1.
    """
    if dim < 1:
        raise ValueError(f"dim = {dim}: latents are cut along a dimension behind the batch, so at least 1")
    rank, sizes = dist.get_rank(group), shard_sizes(size, dist.get_world_size(group))
    start = sum(sizes[:rank])

    def shard(full: Tensor) -> Tensor:
        return full.narrow(dim, start, sizes[rank])

    def gather(local: Tensor) -> Tensor:
        return gather_rows(local, dim=dim, sizes=sizes, group=group)

    return Shards(shard, gather)
