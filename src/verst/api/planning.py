"""What a recipe means and would take, before it costs anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verst.config import RlRecipe, SftRecipe

if TYPE_CHECKING:
    from verst.loops.planned import Plan
    from verst.loops.simulate import Simulation

GPUS = tuple(2**n for n in range(11))
"""1 to 1024."""


def plan(recipe: RlRecipe | SftRecipe, *, steps: bool = False, memory: bool = False) -> Plan:
    """The resolved recipe, its batch arithmetic and its processes. What `verst plan` prints; loads no model.

    steps: also the sigma grid of the model and which of its steps are worth training; reads the model's scheduler. memory:
    also the bytes of a trainer rank and of an engine, or of the one process of SFT; traces shapes, reads no weights.

    Raises ConfigError where a file of the recipe is missing, and for `steps` without a size; ModelError
    for a folder without a model, and for `memory` of a family whose shapes depend on values.
    """
    from verst.loops.planned import make_plan
    from verst.loops.start import with_files

    return make_plan(with_files(recipe, model=steps or memory), steps=steps, memory=memory)


def simulate(
    recipe: RlRecipe | SftRecipe,
    *,
    run: str | Path | None = None,
    times: str | Path | Mapping[str, Any] | None = None,
    gpus: Sequence[int] = GPUS,
) -> Simulation:
    """How long an iteration takes, with the recipe's counts and with what keeps so many GPUs busiest. What
    `verst plan --simulate` prints.

    run: a run folder whose spans say what the stages take, or times: those as tables or a TOML file (docs/scaling.md).
    Raises ConfigError for a recipe of SFT, for both or neither of them, and for rewards whose times are not known.
    """
    from verst.loops.simulate import simulation
    from verst.loops.start import with_files

    return simulation(
        with_files(recipe, model=False),
        run=None if run is None else Path(run),
        times=Path(times) if isinstance(times, str) else times,
        gpus=gpus,
    )
