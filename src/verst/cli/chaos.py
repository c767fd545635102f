"""`verst chaos`: a run among faults, and what holds afterwards."""

from __future__ import annotations

import dataclasses
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from verst.cli.options import print_json
from verst.config.recipe import Recipe
from verst.errors import ConfigError

if TYPE_CHECKING:
    from verst.loops.chaos import Outcome


def run(
    recipe: Recipe,
    source: Path,
    overrides: list[str],
    *,
    seed: int,
    faults: int,
    kinds: list[str],
    out: Path | None,
    limit_s: float,
    timeout_s: float,
    as_json: bool,
) -> None:
    from verst.config.recipe import RlRecipe
    from verst.loops.chaos import chaos, kinds_of

    # A run of its own is under way while this one waits: an end from outside has to reach it too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    if not isinstance(recipe, RlRecipe):
        raise ConfigError(f"{source} is supervised training, which is one process: chaos is for RL recipes")
    there = kinds_of(recipe)
    chosen = [kind for kind in there if not kinds or kind in kinds]
    unknown = sorted(set(kinds) - set(there))
    if unknown:
        raise ConfigError(f"--kinds {' '.join(unknown)}: a run of {source} has {', '.join(there)}")
    folder = out or Path(tempfile.mkdtemp(prefix="verst-chaos-"))
    outcome = chaos(
        recipe,
        source,
        overrides,
        out=folder.absolute(),
        seed=seed,
        faults=faults,
        kinds=chosen,
        limit_s=limit_s,
        timeout_s=timeout_s,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if as_json:
        print_json({"seed": seed, "kinds": chosen, **dataclasses.asdict(outcome)})
    else:
        _print_table(outcome, folder)
    if outcome.problems:
        sys.exit(1)


def _print_table(outcome: Outcome, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    counts = Counter((hit["kind"], hit["action"]) for hit in outcome.injected)
    actions = sorted({action for _, action in counts})
    back = {**outcome.restarts, "driver": outcome.driver_starts - 1}
    table = Table(title=f"{len(outcome.injected)} of {outcome.planned} faults in {outcome.seconds:.0f} s")
    table.add_column("process")
    for name in (*actions, "came back"):
        table.add_column(name, justify="right")
    for kind in sorted({kind for kind, _ in counts}):
        table.add_row(kind, *(str(counts[kind, action]) for action in actions), str(back.get(kind, 0)))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{outcome.iterations} iterations, {outcome.samples} samples, each once; {outcome.metrics} metrics and "
        f"{outcome.tensors} tensors compared with the calm run's"
    )
    if outcome.cut_short is not None:
        console.print(f"fewer faults than planned: {outcome.cut_short}")
    for line in outcome.problems:
        console.print(f"    {line}", markup=False)
    console.print(f"{len(outcome.problems)} problems" if outcome.problems else "All invariants hold.")
    console.print(f"both runs: {folder}")
