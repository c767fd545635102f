"""What `verst plan --simulate` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from verst.cli.options import print_json

if TYPE_CHECKING:
    from verst.loops.simulate import Simulation, Size
    from verst.obs.simulation import Simulated


def show(found: Simulation, *, as_json: bool, console: Console) -> None:
    if as_json:
        sizes = [{"gpus": s.gpus, **dataclasses.asdict(s.counts), **_facts(s.result)} for s in found.sizes]
        report = {
            "stage_times": found.times.model_dump(),
            "recipe": {**dataclasses.asdict(found.counts), **_facts(found.result)},
            "gpus": sizes,
        }
        print_json(report)
        return
    console.print(_stage_table(found.result))
    console.print(_size_table(found.sizes))


def _facts(result: Simulated) -> dict[str, Any]:
    return {
        "rollout_s": result.rollout_s,
        "step_s": result.step_s,
        "samples_per_s": result.samples_per_s,
        "wait_for_rollout_s": result.wait_for_rollout_s,
        "overlap": result.overlap,
        "bottleneck": result.bottleneck,
        "utilisation": {use.name: use.utilisation for use in result.stages},
        "bound_s": {use.name: use.bound_s for use in result.stages},
    }


def _stage_table(result: Simulated) -> Table:
    table = Table(
        title=f"an iteration of this recipe: {result.step_s:.1f} s", title_justify="left", caption_justify="left"
    )
    table.caption = (
        f"rollout {result.rollout_s:.1f} s, {result.overlap:.0%} of it its longest stage; "
        f"{result.samples_per_s:.2f} samples/s; bound by {result.bottleneck}"
    )
    for column in ("stage", "how many", "busy, s", "utilisation"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for use in result.stages:
        table.add_row(use.name, str(use.places), f"{use.bound_s:.1f}", f"{use.utilisation:.0%}")
    return table


def _size_table(sizes: Sequence[Size]) -> Table:
    table = Table(
        title="with so many GPUs at most, what keeps them busiest", title_justify="left", box=SIMPLE_HEAD, padding=0
    )
    columns = ("GPUs", "engines", "busy", "trainer", "busy", "parsers", "rewards", "step, s", "samples/s", "bound by")
    for column in columns:
        table.add_column(column, justify="left" if column == "bound by" else "right")
    table.caption, table.caption_justify = "rewards: workers of each, in the recipe's order", "left"
    for size in sizes:
        counts, result = size.counts, size.result
        busy = {use.name: f"{use.utilisation:.0%}" for use in result.stages}
        table.add_row(
            str(size.gpus),
            str(counts.engines),
            busy["engine"],
            str(counts.trainer_ranks),
            busy["trainer"],
            str(counts.parsers),
            "+".join(map(str, counts.workers.values())),
            f"{result.step_s:.1f}",
            f"{result.samples_per_s:.2f}",
            result.bottleneck,
        )
    return table
