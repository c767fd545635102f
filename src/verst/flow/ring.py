"""Attention over keys and values that travel round a ring of ranks (Ring Attention, arXiv 2310.01889).

Each rank has its own queries and, one after the other, everyone's keys and values. Partial results are joined by their
log-sum-exp in fp32; the backward uses the joined output and log-sum-exp in each part's own kernel, so that no score
matrix is ever whole. Nothing may be masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, lengths: Sequence[int], group: dist.ProcessGroup, scale: float | None
) -> Tensor:
    """[B, H, own queries, D] -> the same shape. lengths: tokens of each rank's keys. Heads of keys equal the queries'.

    Kernels: torch's flash attention, on the CPU in any dtype, on CUDA in fp16 and bf16 only.
    """
    out: Tensor = _Ring.apply(query, key, value, lengths, group, scale)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int],
        group: dist.ProcessGroup,
        scale: float | None,
    ) -> Tensor:
        rank = dist.get_rank(group)
        out = torch.zeros_like(query, dtype=torch.float32)
        total = out.new_full(query.shape[:3], float("-inf"))
        pair: tuple[Tensor, ...] = (key, value)
        for step in range(len(lengths)):
            if step:
                pair = _pass_on(pair, lengths[(rank - step) % len(lengths)], group)
            if pair[0].shape[2] == 0 or query.shape[2] == 0:
                continue
            part, lse = _attend(query, pair[0], pair[1], scale)[:2]
            joined = torch.logaddexp(total, lse)
            out = out * (total - joined).exp().unsqueeze(-1) + part.float() * (lse - joined).exp().unsqueeze(-1)
            total = joined
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, total)
        ctx.lengths, ctx.group, ctx.scale = lengths, group, scale
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        lengths, group = ctx.lengths, ctx.group
        rank, grad = dist.get_rank(group), grad.contiguous()
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        # The gradients of a pair travel with it, and are home after a whole round.
        sums = (torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32))
        carried: tuple[Tensor, ...] = (key, value, *sums)
        for step in range(len(lengths)):
            if step:
                carried = _pass_on(carried, lengths[(rank - step) % len(lengths)], group)
            if carried[0].shape[2] and query.shape[2]:
                parts = _attend_backward(grad, query, carried[0], carried[1], out, total, ctx.scale)
                grad_query += parts[0]
                carried = (carried[0], carried[1], carried[2] + parts[1], carried[3] + parts[2])
        home = _pass_on(carried[2:], lengths[rank], group)
        return grad_query.to(query.dtype), home[0].to(key.dtype), home[1].to(value.dtype), None, None, None


def _pass_on(tensors: tuple[Tensor, ...], length: int, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """To the next rank; `length` tokens come from the one before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    after, before = (dist.get_global_rank(group, other % size) for other in (rank + 1, rank - 1))
    received = tuple(t.new_empty(*t.shape[:2], length, t.shape[3]) for t in tensors)
    sends = [dist.P2POp(dist.isend, t.contiguous(), after, group) for t in tensors]
    receives = [dist.P2POp(dist.irecv, t, before, group) for t in received]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
    return received


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Any:
    """Output and log-sum-exp [B, H, n] first."""
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
    return _aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, scale: float | None
) -> Any:
    """Gradients of query, key and value of one part, given the joined output and log-sum-exp."""
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, total, 0.0, False, scale=scale
        )
    # Without dropout the seed is not read.
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        total,
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        False,
        seed,
        seed,
        scale=scale,
    )
