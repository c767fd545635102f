"""The common path of samples that part later: its forwards are made once for each request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verst.engine.resolve import Resolved


def distinct_rows(jobs: Sequence[Resolved], step: int) -> tuple[Tensor, Tensor] | None:
    """(rows of the batch that `step` needs a forward for, for each row of the batch its place among them).

    Until its `shared_steps` are over, all rows of a request are one and the same, and the first stands for them.
    None where every row needs its own.
    """
    rows: list[int] = []
    places: list[int] = []
    for job in jobs:
        start, own, count = len(places), len(rows), len(job.seeds)
        if step < job.shared_steps:
            rows.append(start)
            places += [own] * count
        else:
            rows += range(start, start + count)
            places += range(own, own + count)
    return None if len(rows) == len(places) else (torch.tensor(rows), torch.tensor(places))
