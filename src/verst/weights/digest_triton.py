"""The digest's inner sums in one kernel launch over any number of tensors. Imported only where Triton and CUDA are."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _sums(pointers, lengths, factors, keys, out, SEGMENT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One segment: C_s sum_i K_i w_i in wrapping 64-bit arithmetic."""
    segment = tl.program_id(0)
    words = tl.load(pointers + segment).to(tl.pointer_type(tl.int32))
    length = tl.load(lengths + segment)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, SEGMENT, BLOCK):
        place = start + tl.arange(0, BLOCK)
        # Words are read once and must not push the keys out of L1.
        word = tl.load(words + place, mask=place < length, other=0, cache_modifier=".cg")
        total += word.to(tl.int64) * tl.load(keys + place)
    tl.store(out + segment, tl.sum(total, axis=0) * tl.load(factors + segment))


def segment_sums(plan: tuple[Tensor, Tensor, Tensor, Tensor], *, keys: Tensor, segment: int) -> Tensor:
    """[S] int64, one for each segment of the plan (address, words, owner, factor; all [S] int64)."""
    pointers, lengths, _, factors = plan
    out = torch.empty_like(factors)
    if len(out):
        with torch.cuda.device(out.device):
            _sums[(len(out),)](pointers, lengths, factors, keys, out, SEGMENT=segment, BLOCK=_BLOCK, num_warps=4)
    return out
