"""Where the time of a run went, from the spans in its folder."""

from __future__ import annotations

from pathlib import Path

from verst.config import load_recipe
from verst.config.placement import ColocatedPlacement
from verst.config.recipe import RlRecipe
from verst.errors import ConfigError
from verst.loops.simulate import rewards_of, run_of
from verst.obs import triage
from verst.obs.spans import FILE, Span, read_spans
from verst.obs.trace import write_trace


def triage_run(run: Path) -> triage.Triage:
    """Raises ConfigError for a folder that is no RL run, or whose first iteration is not over."""
    spans = spans_of(run, newest=True)
    recipe = load_recipe(run / "recipe.toml")
    if not isinstance(recipe, RlRecipe):
        raise ConfigError(f"{run} is an SFT run; only RL runs have rollouts to look at")
    return triage.triage(spans, setup_of(recipe))


def trace_run(run: Path, out: Path | None = None) -> tuple[Path, int]:
    """Write a run's spans for ui.perfetto.dev; the file (unset: trace.json in the run folder) and how many they are."""
    spans = spans_of(run)
    path = out or run / "trace.json"
    write_trace(spans, path)
    return path, len(spans)


def setup_of(recipe: RlRecipe) -> triage.Setup:
    """What triage has to know of a recipe."""
    return triage.Setup(
        run=run_of(recipe),
        engines=recipe.engine.num,
        parsers=recipe.rollout.parsers.num,
        rewards=rewards_of(recipe),
        trainer_ranks=recipe.trainer.ranks,
        may_overlap=not isinstance(recipe.cluster.placement, ColocatedPlacement),
    )


def spans_of(run: Path, *, newest: bool = False) -> list[Span]:
    """newest: of the process that was started last. Raises ConfigError for a folder without any."""
    spans = read_spans(run, newest=newest)
    if not spans:
        raise ConfigError(f"{run / 'events' / FILE} is missing or holds no spans; name the folder of an RL run")
    return spans
