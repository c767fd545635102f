"""Make recorded iterations of a run again and compare: the same bits, or the names of what differs.

A copy of the run starts from a kept checkpoint in a folder of its own; the run itself is only read.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verst.errors import ConfigError
from verst.loops.rl import train_rl
from verst.loops.run_folder import RunFolder, stored_rl_recipe
from verst.obs.metrics import read_metrics
from verst.obs.waiting import Tell, nobody
from verst.trainer import checkpoint


@dataclass(frozen=True, kw_only=True)
class Replay:
    first: int
    """Iterations that were made again, from `first`."""
    last: int
    metrics: int
    """Values compared; those of perf/ are the clock's and are left out."""
    tensors: int | None
    """Tensors compared bit for bit; None where the run keeps no checkpoint of `last`."""
    differences: tuple[str, ...]
    """One line each; none: the same run."""


async def replay(run: Path, iteration: int | None = None, *, tell: Tell = nobody) -> Replay:
    """Iteration `iteration`, from the newest checkpoint before it; None takes the newest checkpoint's own.

    Raises ConfigError where no kept checkpoint lies before it, or the run has not reached it.
    """
    recipe = stored_rl_recipe(run)
    kept = [checkpoint.iteration_of(folder) for folder in checkpoint.published(run / "checkpoints")]
    recorded = {int(row["iteration"]): row for row in read_metrics(run / "metrics.jsonl")}
    last = iteration if iteration is not None else (kept[-1] if kept else max(recorded, default=0))
    if last < 1 or last not in recorded:
        raise ConfigError(f"{run} has not made iteration {last}; it has made 1..{max(recorded, default=0)}")
    start = max((step for step in kept if step < last), default=0)
    with tempfile.TemporaryDirectory(prefix="verst-replay-") as scratch:
        copied = recipe.model_copy(update={"run": recipe.run.model_copy(update={"folder": Path(scratch)})})
        folder = RunFolder(copied)
        # An alarm may roll back to an older one.
        needed = [step for step in kept if step <= start] if recipe.checkpoint.keep_best else [start]
        for step in needed if start else []:
            name = checkpoint.step_folder(folder.checkpoints, step).name
            shutil.copytree(run / "checkpoints" / name, folder.checkpoints / name)
        shutil.copyfile(run / "metrics.jsonl", folder.metrics)
        tell(f"making iterations {start + 1} to {last} again")
        try:
            await train_rl(copied, folder, quiet=True, until=last)
        finally:
            folder.close()
        tell("comparing")
        again = {int(row["iteration"]): row for row in read_metrics(folder.metrics)}
        differences, metrics = [], 0
        for number in range(start + 1, last + 1):
            found, count = compare_metrics(number, recorded.get(number, {}), again.get(number, {}))
            differences += found
            metrics += count
        tensors = None
        if last in kept:
            name = checkpoint.step_folder(folder.checkpoints, last).name
            found, tensors = compare_tensors(run / "checkpoints" / name, folder.checkpoints / name)
            differences += found
    return Replay(first=start + 1, last=last, metrics=metrics, tensors=tensors, differences=tuple(differences))


def compare_metrics(iteration: int, one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[list[str], int]:
    """One line for each that differs, and how many were compared: all but what the clock and faults decide."""
    names = sorted(key for key in one.keys() | two.keys() if not key.startswith(("perf/", "supervision/")))
    lines = []
    for name in names:
        before, after = one.get(name), two.get(name)
        same = before == after or (_is_nan(before) and _is_nan(after))
        if not same:
            lines.append(f"iteration {iteration}: {name} was {before}, is {after}")
    return lines, len(names)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def compare_tensors(one: Path, two: Path) -> tuple[list[str], int]:
    """Weights, optimizer, averages and counters of two checkpoints."""
    before, after = _tensors(one), _tensors(two)
    lines = [f"{one.name}: {name} is in one checkpoint only" for name in sorted(before.keys() ^ after.keys())]
    for name in sorted(before.keys() & after.keys()):
        if not torch.equal(before[name], after[name]):
            largest = float((before[name].double() - after[name].double()).abs().max())
            lines.append(f"{one.name}: {name} differs by up to {largest:.3g}")
    return lines, len(before.keys() | after.keys())


def _tensors(folder: Path) -> dict[str, Tensor]:
    checkpoint.read_state(folder)
    return checkpoint.all_tensors(folder)
