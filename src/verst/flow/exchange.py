"""Collectives of a sequence that is cut over ranks, each the exact adjoint of its own backward.

Every rank computes the same loss L of the whole sequence. Where each collective's backward is its transpose, the mean
over the ranks of a parameter's gradient is dL/d(parameter), whatever part of the model is cut and whatever is computed
alike on every rank.

Sources: DeepSpeed-Ulysses (arXiv 2309.14509): tokens are exchanged for heads around the attention. Ring Attention
(arXiv 2310.01889): keys and values travel, and partial results are joined by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from verst.flow.shards import gather_rows

Rows = Sequence[Sequence[int]]
"""member of the group -> how many tokens of each joined sequence it holds."""


def gather_tokens(local: Tensor, *, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, one behind the other along `dim`; sizes: of each rank's part."""
    whole: Tensor = _Gather.apply(local, dim, sizes, group)
    return whole


def sum_over_ranks(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks, in their order and so with the same bits on each."""
    total: Tensor = _Sum.apply(x, group)
    return total


def to_heads(x: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    """[B, H, own tokens, D] -> [B, H / ranks, all tokens, D], each joined sequence whole and in its own order."""
    heads: Tensor = _ToHeads.apply(x, rows, group) if len(rows) > 1 else x
    return heads


def to_tokens(x: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `to_heads`."""
    tokens: Tensor = _ToTokens.apply(x, rows, group) if len(rows) > 1 else x
    return tokens


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        return gather_rows(local, dim=dim, sizes=sizes, group=group)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Each rank's gradient of my part comes to me, in the order of ranks: the sum is the same on every machine.
        own = ctx.sizes[dist.get_rank(ctx.group)]
        pieces = list(grad.split(list(ctx.sizes), dim=ctx.dim))
        shape = [*grad.shape[: ctx.dim], own, *grad.shape[ctx.dim + 1 :]]
        parts = _exchange(pieces, [shape] * len(pieces), ctx.group)
        return torch.stack(parts).sum(dim=0), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _added(x, group)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _added(grad, ctx.group), None


def _added(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts).sum(dim=0)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        return _tokens_for_heads(x, rows, group)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _heads_for_tokens(grad, ctx.rows, ctx.group), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        return _heads_for_tokens(x, rows, group)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _tokens_for_heads(grad, ctx.rows, ctx.group), None, None


def _tokens_for_heads(x: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    batch, heads, _, width = x.shape
    shapes = [[batch, heads // len(rows), sum(counts), width] for counts in rows]
    parts = _exchange(list(x.chunk(len(rows), dim=1)), shapes, group)
    pieces = [part.split(list(counts), dim=2) for part, counts in zip(parts, rows, strict=True)]
    return torch.cat([piece[i] for i in range(len(rows[0])) for piece in pieces], dim=2)


def _heads_for_tokens(x: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    batch, heads, _, width = x.shape
    sequences = x.split([sum(counts[i] for counts in rows) for i in range(len(rows[0]))], dim=2)
    pieces = [s.split([counts[i] for counts in rows], dim=2) for i, s in enumerate(sequences)]
    sent = [torch.cat([piece[member] for piece in pieces], dim=2) for member in range(len(rows))]
    own = sum(rows[dist.get_rank(group)])
    return torch.cat(_exchange(sent, [[batch, heads, own, width]] * len(rows), group), dim=1)


def _exchange(sent: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup) -> list[Tensor]:
    """Piece i goes to member i; what member i sent has shape `shapes[i]`."""
    flat = torch.cat([piece.reshape(-1) for piece in sent])
    counts = [torch.Size(shape).numel() for shape in shapes]
    received = flat.new_empty(sum(counts))
    dist.all_to_all_single(received, flat, counts, [piece.numel() for piece in sent], group=group)
    return [part.view(list(shape)) for part, shape in zip(received.split(counts), shapes, strict=True)]
