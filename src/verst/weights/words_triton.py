"""Any number of tensors copied and digested by one kernel launch. Imported only where Triton and CUDA are."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _words(  # type: ignore[no-untyped-def]
    sources,
    targets,
    lengths,
    owners,
    factors,
    keys,
    sums,
    broken,
    COPY: tl.constexpr,
    ROUND: tl.constexpr,
    EXPONENT: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One segment: its words to where they belong, and C_s sum_i K_i w_i of them in wrapping 64-bit arithmetic.

    ROUND: the source is fp32, and two of its elements, rounded, make a word. EXPONENT: bits of a word's exponents, all
    of which are set in what is not finite; 0 = nobody asks.
    """
    segment = tl.program_id(0)
    source = tl.load(sources + segment)
    target = tl.load(targets + segment).to(tl.pointer_type(tl.int32))
    length = tl.load(lengths + segment)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    bad = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, SEGMENT, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < length
        # Words are read once and must not push the keys out of L1.
        if ROUND == 0:
            word = tl.load(source.to(tl.pointer_type(tl.int32)) + place, mask=inside, other=0, cache_modifier=".cg")
        else:
            floats = source.to(tl.pointer_type(tl.float32)) + 2 * place
            first = tl.load(floats, mask=inside, other=0.0)
            second = tl.load(floats + 1, mask=inside, other=0.0)
            if ROUND == 1:
                low = first.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
                high = second.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
            else:
                low = first.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
                high = second.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            word = (low & 0xFFFF) | (high << 16)
        if COPY:
            tl.store(target + place, word, mask=inside)
        total += word.to(tl.int64) * tl.load(keys + place)
        if EXPONENT == 32:
            bad |= ((word & 0x7F800000) == 0x7F800000).to(tl.int32)
        if EXPONENT == 16:
            bad |= ((word & 0x7F80) == 0x7F80).to(tl.int32) | ((word & 0x7F800000) == 0x7F800000).to(tl.int32)
        if EXPONENT == 10:
            bad |= ((word & 0x7C00) == 0x7C00).to(tl.int32) | ((word & 0x7C000000) == 0x7C000000).to(tl.int32)
    owner = tl.load(owners + segment)
    # Sums of integers: the order in which they are added makes no difference.
    tl.atomic_add(sums + owner, tl.sum(total, axis=0) * tl.load(factors + segment))
    if EXPONENT != 0:
        tl.atomic_or(broken + owner, tl.max(bad, axis=0).to(tl.int64))


_EXPONENTS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 10}
_ROUNDS = {torch.bfloat16: 1, torch.float16: 2}


def run(
    plan: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    keys: Tensor,
    segment: int,
    sums: Tensor,
    broken: Tensor,
    sources: Tensor | None = None,
    rounded_to: torch.dtype | None = None,
    finite_as: torch.dtype | None = None,
) -> None:
    """Add the digest of each tensor of `plan` to its place in `sums`, [n] int64.

    plan: address of each segment, words, tensor it is of, factor; all [S] int64. sources: [S] addresses of what is
    copied there; None = only read. rounded_to: it is fp32 and lands in this dtype; None = words as they are. finite_as:
    set `broken`, [n] int64, to 1 where an element of this dtype is not finite.
    """
    targets, lengths, owners, factors = plan
    if len(targets):
        with torch.cuda.device(sums.device):
            _words[(len(targets),)](
                targets if sources is None else sources,
                targets,
                lengths,
                owners,
                factors,
                keys,
                sums,
                broken,
                COPY=sources is not None,
                ROUND=0 if rounded_to is None else _ROUNDS[rounded_to],
                EXPONENT=0 if finite_as is None else _EXPONENTS[finite_as],
                SEGMENT=segment,
                BLOCK=_BLOCK,
                num_warps=4,
            )
