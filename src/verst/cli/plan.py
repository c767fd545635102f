"""`verst plan`: what a recipe means, before it costs anything."""

from __future__ import annotations

import tomli_w
from rich.console import Console
from rich.table import Table

from verst.config.plan import batch_plan, process_plan
from verst.config.recipe import Recipe, RlRecipe


def run(recipe: Recipe, console: Console | None = None) -> None:
    console = console or Console()
    text = tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))
    console.print(text, markup=False, highlight=console.is_terminal, soft_wrap=True)
    if isinstance(recipe, RlRecipe):
        console.print(_batch_table(recipe))
        console.print(_process_table(recipe))


def _batch_table(recipe: RlRecipe) -> Table:
    plan = batch_plan(recipe)
    table = Table(title="one iteration", title_justify="left", show_header=False)
    rows = [
        ("samples", f"{plan.num_groups} prompts x {plan.group_size} = {plan.samples}"),
        ("engine requests", f"{plan.microgroups} microgroups of {recipe.rollout.microgroup_size}"),
        ("trained pairs", f"{plan.samples} samples x {plan.trained_steps} steps = {plan.pairs}"),
        ("optimizer steps", f"{plan.optimizer_steps} of {plan.pairs_per_optimizer_step} pairs"),
        (
            "tiles",
            f"{plan.tiles_per_rank} of {recipe.trainer.tile_size} pairs on each of {recipe.trainer.ranks} ranks",
        ),
        (
            "ratio before an update",
            "exactly 1: tiles have the engine's batch shape"
            if plan.exact_ratio
            else "1 to rounding: tiles and engine batches differ in shape",
        ),
        ("whole run", f"{recipe.run.iterations} iterations, {recipe.run.iterations * plan.samples} samples"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _process_table(recipe: RlRecipe) -> Table:
    table = Table(title="processes (Ray actors), besides the driver", title_justify="left")
    for column in ("role", "count", "Ray CPUs each"):
        table.add_column(column)
    for process in process_plan(recipe):
        table.add_row(process.role, str(process.count), f"{process.cpus:g}")
    return table
