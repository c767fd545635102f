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


def to_heads(tensors: Sequence[Tensor], rows: Sequence[Rows], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """[B, H, own tokens, D] each -> [B, H / ranks, all tokens, D], each joined sequence whole and in its own order.

    rows: of each tensor. All of them, of one dtype, travel in one collective.
    """
    if len(rows[0]) == 1:
        return tuple(tensors)
    heads: tuple[Tensor, ...] = _ToHeads.apply(group, rows, *tensors)
    return heads


def to_tokens(x: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `to_heads`, of one tensor."""
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
        parts = _swap([[piece] for piece in pieces], [[shape]] * len(pieces), ctx.group)
        return torch.stack([part for (part,) in parts]).sum(dim=0), None, None, None


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
    def forward(ctx: Any, group: dist.ProcessGroup, rows: Sequence[Rows], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rows, ctx.group = rows, group
        return tuple(_tokens_for_heads(tensors, rows, group))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_heads_for_tokens(grads, ctx.rows, ctx.group)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        return _heads_for_tokens([x], [rows], group)[0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _tokens_for_heads([grad], [ctx.rows], ctx.group)[0], None, None


def _tokens_for_heads(tensors: Sequence[Tensor], rows: Sequence[Rows], group: dist.ProcessGroup) -> list[Tensor]:
    ranks = len(rows[0])
    chunks = [x.chunk(ranks, dim=1) for x in tensors]
    shapes = [
        [[x.shape[0], x.shape[1] // ranks, sum(its[member]), x.shape[3]] for x, its in zip(tensors, rows, strict=True)]
        for member in range(ranks)
    ]
    parts = _swap([[of[member] for of in chunks] for member in range(ranks)], shapes, group)
    out = []
    for index, its in enumerate(rows):
        pieces = [part[index].split(list(counts), dim=2) for part, counts in zip(parts, its, strict=True)]
        out.append(torch.cat([piece[i] for i in range(len(its[0])) for piece in pieces], dim=2))
    return out


def _heads_for_tokens(tensors: Sequence[Tensor], rows: Sequence[Rows], group: dist.ProcessGroup) -> list[Tensor]:
    ranks, rank = len(rows[0]), dist.get_rank(group)
    sent: list[list[Tensor]] = [[] for _ in range(ranks)]
    for x, its in zip(tensors, rows, strict=True):
        sequences = x.split([sum(counts[i] for counts in its) for i in range(len(its[0]))], dim=2)
        pieces = [s.split([counts[i] for counts in its], dim=2) for i, s in enumerate(sequences)]
        for member in range(ranks):
            sent[member].append(torch.cat([piece[member] for piece in pieces], dim=2))
    shapes = [[x.shape[0], x.shape[1], sum(its[rank]), x.shape[3]] for x, its in zip(tensors, rows, strict=True)]
    parts = _swap(sent, [shapes] * ranks, group)
    return [torch.cat([part[index] for part in parts], dim=1) for index in range(len(tensors))]


def _swap(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """sent: of each member, what goes there; shapes: of each member, of what comes from there. One collective."""
    flat = torch.cat([piece.reshape(-1) for pieces in sent for piece in pieces])
    counts = [[torch.Size(shape).numel() for shape in of_member] for of_member in shapes]
    totals = [sum(of_member) for of_member in counts]
    received = flat.new_empty(sum(totals))
    sizes = [sum(piece.numel() for piece in pieces) for pieces in sent]
    dist.all_to_all_single(received, flat, totals, sizes, group=group)
    return [
        [piece.view(list(shape)) for piece, shape in zip(part.split(lengths), of_member, strict=True)]
        for part, lengths, of_member in zip(received.split(totals), counts, shapes, strict=True)
    ]
