"""Forwards that depend on the rows of a batch, under FSDP2: ranks must make as many, in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def max_over_ranks(module: nn.Module, values: Sequence[int]) -> list[int]:
    """The largest of each value over all ranks that share the sharded module; the values themselves if none do.

    A sharded module is gathered by all ranks together: a forward that one rank makes alone would wait for the others
    forever. Ranks with nothing to do there make it on any rows, and add its result times 0.
    """
    # Frozen parameters in fp32 may stay whole beside a base in bf16: not every parameter is sharded.
    sharded = next((p for p in module.parameters() if isinstance(p, DTensor)), None)
    if sharded is None:
        return list(values)
    counts = torch.tensor(values, dtype=torch.int32, device=sharded.device)
    for dim in range(sharded.device_mesh.ndim):
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=sharded.device_mesh.get_group(dim))
    result: list[int] = counts.tolist()
    return result
