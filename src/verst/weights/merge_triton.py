"""base + scale B A of many layers of one shape in one launch, summed in fp32 and rounded as it is written.

Imported only where Triton and CUDA are. One read of the base and one write of the weights: no product is kept in between.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    base, a, b, out, scale, rows, columns, RANK: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr
):
    layer = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    has_row, has_column = row[:, None] < rows, column[None, :] < columns
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, RANK, CHUNK):
        rank = start + tl.arange(0, CHUNK)
        left = tl.load(
            b + layer * rows * RANK + row[:, None] * RANK + rank[None, :],
            mask=has_row & (rank[None, :] < RANK),
            other=0.0,
        )
        right = tl.load(
            a + layer * RANK * columns + rank[:, None] * columns + column[None, :],
            mask=has_column & (rank[:, None] < RANK),
            other=0.0,
        )
        total = tl.dot(left * scale, right, total, input_precision="ieee")
    place = layer * rows * columns + row[:, None].to(tl.int64) * columns + column[None, :]
    inside = has_row & has_column
    weight = tl.load(base + place, mask=inside, other=0.0).to(tl.float32) + total
    tl.store(out + place, weight.to(out.dtype.element_ty), mask=inside)


def merge(base: Tensor, a: Tensor, b: Tensor, *, scale: float, out: Tensor) -> None:
    """base, out: [n, rows, columns] in the model's dtype; a: [n, r, columns] and b: [n, rows, r] in fp32."""
    count, rows, columns = base.shape
    rank = a.shape[1]
    chunk = min(32, max(16, triton.next_power_of_2(rank)))
    grid = (triton.cdiv(columns, _TILE), triton.cdiv(rows, _TILE), count)
    with torch.cuda.device(base.device):
        _merge[grid](base, a, b, out, scale, rows, columns, RANK=rank, CHUNK=chunk, TILE=_TILE, num_warps=4)
