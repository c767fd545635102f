"""`verst plan`: what a recipe means, before it costs anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from rich.console import Console
from rich.table import Table

from verst.cli.options import print_json, waiting
from verst.config.plan import BatchPlan, ProcessPlan
from verst.config.recipe import Recipe, RlRecipe
from verst.errors import ConfigError

if TYPE_CHECKING:
    from verst.loops.memory_plan import MemoryPlan
    from verst.loops.planned import Plan, StreamSteps


def run(recipe: Recipe, *, steps: bool, memory: bool, as_json: bool, quiet: bool) -> None:
    from verst.loops.planned import make_plan

    with waiting(quiet=quiet or as_json or not (steps or memory)) as tell:
        tell("tracing the model's shapes" if memory else "reading the model's scheduler")
        plan = make_plan(recipe, steps=steps, memory=memory)
    if as_json:
        print_json(_as_tables(plan))
        return
    console = Console()
    text = tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))
    console.print(text, markup=False, highlight=console.is_terminal, soft_wrap=True)
    if isinstance(recipe, RlRecipe) and plan.batch is not None:
        console.print(_batch_table(recipe, plan.batch))
        console.print(_process_table(plan.processes))
    if plan.memory is not None:
        print_memory(plan.memory, console)
    if plan.steps is not None:
        print_steps(plan.steps, recipe.sampling.transition.type, console)


def _as_tables(plan: Plan) -> dict[str, Any]:
    """With the recipe as it is written in TOML, and what is the most at a time beside the memory's items."""
    tables = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    tables["recipe"] = plan.recipe.model_dump(mode="json", exclude_none=True)
    if plan.memory is not None:
        tables["memory"] = {
            "trainer": plan.memory.trainer,
            "trainer_peak_bytes": plan.memory.trainer_peak_bytes,
            "engine": plan.memory.engine,
            "engine_peak_bytes": plan.memory.engine_peak_bytes,
        }
    return tables


def print_steps(streams: Mapping[str, StreamSteps], transition: str, console: Console) -> None:
    """The model's sigma grid: size and noise of each step, and which of them the recipe may train."""
    for stream, steps in streams.items():
        table = Table(title=f"steps of {stream} ({transition})", title_justify="left")
        for column in ("step", "sigma", "|d sigma|", "noise std"):
            table.add_column(column, justify="right")
        for row in steps.rows:
            table.add_row(str(row.index), f"{row.sigma:.4f}", f"{row.size:.4f}", f"{row.noise_std:.4f}")
        console.print(table)
        console.print(f"steps with noise worth training: low = {steps.low}, high = {steps.high}", highlight=False)


def print_memory(plan: MemoryPlan, console: Console) -> None:
    """GiB of each item, what is in host memory apart, and the most that a GPU has to give at a time."""
    from verst.trainer.estimate import gib, host_of, peak_of

    when = {"always": "", "tile": "in a forward and backward", "step": "in the optimizer's step"}
    titles = {"a trainer rank": plan.trainer, "an engine": plan.engine} if plan.engine else {"the run": plan.trainer}
    for title, items in titles.items():
        table = Table(title=f"memory of {title}, GiB", title_justify="left")
        for column in ("what", "GPU", "host", "when"):
            table.add_column(column, justify="left" if column in ("what", "when") else "right")
        for item in items:
            phase = "" if title == "an engine" else when[item.phase]
            table.add_row(item.name, *(("", gib(item.bytes)) if item.host else (gib(item.bytes), "")), phase)
        table.add_row("most at a time", gib(peak_of(items)), gib(host_of(items)), "")
        console.print(table)


def print_simulation(
    recipe: Recipe,
    *,
    source: Path | None,
    times: Path | None,
    gpus: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """How long an iteration takes, on how many GPUs. gpus: numbers with commas between."""
    from verst.cli.simulate import show
    from verst.loops.simulate import simulation

    try:
        numbers = [int(number) for number in gpus.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ConfigError(f"--gpus {gpus} must be numbers from 1 with commas between, e.g. 8,64")
    with waiting(quiet=quiet or as_json) as tell:
        tell("simulating")
        found = simulation(recipe, run=source, times=times, gpus=numbers)
    show(found, as_json=as_json, console=Console())


def _batch_table(recipe: RlRecipe, plan: BatchPlan) -> Table:
    table = Table(title="one iteration", title_justify="left", show_header=False)
    rows = [
        ("samples", f"{plan.num_groups} prompts x {plan.group_size} = {plan.samples}"),
        ("engine requests", f"{plan.microgroups} microgroups of {recipe.rollout.microgroup_size}{_way(recipe)}"),
        ("trained pairs", f"{plan.samples} samples x {plan.trained_steps} steps = {plan.pairs}"),
        ("optimizer steps", f"{plan.optimizer_steps} of {plan.pairs_per_optimizer_step} pairs"),
        (
            "tiles",
            f"{plan.tiles_per_rank} of {recipe.trainer.tile_size} pairs on each of {recipe.trainer.ranks} ranks",
        ),
        ("ratio before an update", _ratio(recipe, exact=plan.exact_ratio)),
        ("whole run", f"{recipe.run.iterations} iterations, {recipe.run.iterations * plan.samples} samples"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _way(recipe: RlRecipe) -> str:
    return ", through a router of the run's own" if recipe.engine.router.enabled else ""


def _ratio(recipe: RlRecipe, *, exact: bool) -> str:
    if recipe.schedule.staleness:
        return f"to samples that are up to {recipe.schedule.staleness} weight versions behind: docs/schedules.md"
    if exact:
        return "exactly 1: tiles have the engine's batch shape"
    if recipe.engine.type == "sglang":
        return "1 to rounding: SGLang's log-probs are of the noise that it drew (docs/sglang.md)"
    return "1 to rounding: tiles and engine batches differ in shape"


def _process_table(processes: Sequence[ProcessPlan]) -> Table:
    table = Table(title="processes (Ray actors), besides the driver", title_justify="left")
    for column in ("role", "count", "Ray CPUs each"):
        table.add_column(column)
    for process in processes:
        table.add_row(process.role, str(process.count), f"{process.cpus:g}")
    return table
