"""Counting the bytes of live tensors, real or of shapes alone, while a forward and a backward run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made inside and are still alive, each rounded up as an allocator does.

    What an operation allocates and frees inside of itself (a kernel's workspace) is not seen.
    """

    def __init__(self, *, granule: int = 512) -> None:
        """granule: bytes; torch's CUDA allocator gives multiples of 512."""
        super().__init__()
        self._granule = granule
        self._known: dict[int, weakref.ref[Any]] = {}
        self._sized: dict[int, int] = {}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What comes in from outside, as a weight, is no byte of ours, and neither is a view of it.
        self._see((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self._see(out, made=True)
        return out

    def _see(self, values: Any, *, made: bool) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and value.device.type != "meta":
                storage = value.untyped_storage()
                known = self._known.get(storage._cdata)
                if known is None or known() is not storage:
                    self._count(storage, -(-storage.nbytes() // self._granule) * self._granule if made else 0)

    def stand_in(self, real: Tensor, fake: Tensor) -> None:
        """`fake` takes the place of `real`, and its bytes where those are counted."""
        storage = real.untyped_storage()
        if storage._cdata in self._sized and fake.untyped_storage()._cdata not in self._known:
            self._count(fake.untyped_storage(), self._sized[storage._cdata])

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata

        def gone(reference: weakref.ref[Any]) -> None:
            self.now -= size
            if self._known.get(key) is reference:
                del self._known[key], self._sized[key]

        self._known[key], self._sized[key] = weakref.ref(storage, gone), size
        self.now += size
        self.peak = max(self.peak, self.now)


@contextmanager
def fused_attention() -> Iterator[None]:
    """torch's attention as a GPU's fused kernels leave it in memory: one output, and one number a query for the backward.

    On shapes a CPU would choose a kernel of its own, or all products of queries and keys. In torch's own namespace, not
    by a function mode: that is off inside of a backward, where a block may be computed again.
    """
    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attend  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    # A mask of booleans is made into one of numbers, which the backward reads.
    mask = None if attn_mask is None else attn_mask.to(query.dtype, copy=attn_mask.dtype == torch.bool)
    apply: Callable[..., Tensor] = _Fused.apply
    return apply(query, key, value, mask)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # Kernels write [B, S, H, D], so that the transpose that follows is a view.
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        per_query = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, per_query)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
