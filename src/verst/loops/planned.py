"""What a recipe means, before it costs anything. Loads torch only for the sigma grid and for memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verst.config.plan import BatchPlan, ProcessPlan, batch_plan, process_plan
from verst.config.recipe import Recipe, RlRecipe, SftRecipe
from verst.errors import ConfigError

if TYPE_CHECKING:
    from verst.flow.steps_table import StepRow
    from verst.loops.memory_plan import MemoryPlan


@dataclass(frozen=True, kw_only=True)
class StreamSteps:
    """The denoising steps of one stream of latents."""

    rows: tuple[StepRow, ...]
    """From noise to picture."""
    low: int
    high: int
    """Steps low..high - 1 have noise worth training; the last one never has."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    recipe: RlRecipe | SftRecipe
    """Its files found, every default filled in."""
    batch: BatchPlan | None
    """None of SFT, which has no rollouts."""
    processes: tuple[ProcessPlan, ...]
    """Ray actors, besides the driver; none of SFT, which is one process."""
    steps: Mapping[str, StreamSteps] | None
    """Stream (`visual`, `audio`) -> its steps; None where they were not asked for."""
    memory: MemoryPlan | None
    """Of a trainer rank and of an engine, by item; None where it was not asked for."""


def make_plan(recipe: Recipe, *, steps: bool, memory: bool) -> Plan:
    """Raises what `steps_of` and `memory_plan` raise where these are asked for."""
    return Plan(
        recipe=recipe,
        batch=batch_plan(recipe) if isinstance(recipe, RlRecipe) else None,
        processes=tuple(process_plan(recipe)) if isinstance(recipe, RlRecipe) else (),
        steps=steps_of(recipe) if steps else None,
        memory=_memory_of(recipe) if memory else None,
    )


def _memory_of(recipe: Recipe) -> MemoryPlan:
    from verst.loops.memory_plan import memory_plan

    return memory_plan(recipe)


def steps_of(recipe: Recipe) -> dict[str, StreamSteps]:
    """Stream -> the size and the noise of each step of the model's sigma grid, and which of them are worth training.

    Reads the model's scheduler and none of its weights. Raises ConfigError where the recipe does not say the size.
    """
    import torch

    from verst.families import Geometry, recognise
    from verst.flow.controller import make_transition
    from verst.flow.steps_table import propose_window, step_rows

    family = recognise(recipe.model.path)
    parts = family.load(recipe.model.path, parts=("scheduler",), dtype=torch.float32, device=torch.device("cpu"))
    sampling = recipe.sampling
    if sampling.height is None or sampling.width is None:
        raise ConfigError("the steps need sampling.height and sampling.width: the sigma grid depends on the size")
    geometry = Geometry(height=sampling.height, width=sampling.width, num_frames=sampling.num_frames, fps=sampling.fps)
    grids = family.schedule(parts, geometry, num_steps=sampling.num_steps, shift=sampling.sigma_shift)
    transition = make_transition(sampling.transition.type, sampling.transition.eta)
    found = {}
    for stream, scheduler in grids.items():
        rows = step_rows(scheduler.sigmas, transition)
        low, high = propose_window(rows, size=2)
        found[stream] = StreamSteps(rows=tuple(rows), low=low, high=high)
    return found
