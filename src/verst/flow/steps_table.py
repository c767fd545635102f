"""What each denoising step does to the noise, so that a person can choose the trained window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verst.flow.transitions import Transition


@dataclass(frozen=True, kw_only=True)
class StepRow:
    index: int
    sigma: float
    size: float
    """sigma - next sigma."""
    noise_std: float
    """Standard deviation of the noise that a stochastic step adds; NaN-free, 0 where it adds none."""


def step_rows(sigmas: Tensor, transition: Transition) -> list[StepRow]:
    """One row a step of a grid [T+1]."""
    one = torch.ones(())
    rows = []
    for index in range(len(sigmas) - 1):
        sigma, following = sigmas[index].float(), sigmas[index + 1].float()
        step = transition(one, one, sigma=sigma, next_sigma=following, first_sigma=sigmas[1].float())
        rows.append(
            StepRow(
                index=index,
                sigma=float(sigma),
                size=float(sigma - following),
                noise_std=float(step.std),
            )
        )
    return rows


def propose_window(rows: list[StepRow], *, size: int) -> tuple[int, int]:
    """[low, high) of consecutive steps to train in, for grids of unlike steps (Karras).

    A step whose noise is under a tenth of the grid's largest hardly explores, and its log-prob is all scale. The
    proposal is the longest run of steps above that, at least `size` long, without the last step.
    """
    enough = [row.noise_std >= 0.1 * max(r.noise_std for r in rows) for row in rows[:-1]]
    best, start = (0, 0), None
    for index, good in enumerate([*enough, False]):
        if good and start is None:
            start = index
        elif not good and start is not None:
            if index - start > best[1] - best[0]:
                best = (start, index)
            start = None
    if best[1] - best[0] >= size:
        return best
    middle = max(range(len(rows) - size), key=lambda i: sum(row.noise_std for row in rows[i : i + size]), default=0)
    return (middle, middle + size)
