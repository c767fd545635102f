"""What to do with a run that is there: evaluate, export, look where its time went, check that it can be made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from verst.api.running import wait_for
from verst.config import RlRecipe, SftRecipe

if TYPE_CHECKING:
    from verst.loops.evaluate import Evaluation
    from verst.loops.explain import Explanation
    from verst.loops.replay import Replay
    from verst.obs.triage import Triage
    from verst.trainer.export import Exported


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    iteration: int
    folder: Path
    best: bool
    """The one that `checkpoint = "best"` names (checkpoint.keep_best)."""


def checkpoints(run: str | Path) -> list[Checkpoint]:
    """Those that a run keeps, oldest first. Raises ConfigError for another folder."""
    from verst.loops.run_folder import stored_recipe
    from verst.trainer.checkpoint import best_folder, iteration_of, published

    stored_recipe(Path(run))
    root = Path(run) / "checkpoints"
    best = best_folder(root)
    return [Checkpoint(iteration=iteration_of(f), folder=f, best=f == best) for f in published(root)]


def evaluate(
    target: str | Path | RlRecipe | SftRecipe, *, checkpoint: str | int = "newest", ema: bool = False
) -> Evaluation:
    """Held-out rewards of a checkpoint of a run, or of a recipe's untrained model, in this process. What `verst eval` prints.

    target: a run folder, or a recipe. checkpoint: newest, best or an iteration. ema: the moving average of the weights.
    It computes with the recipe's number of threads, so that a run's own numbers come out.

    Raises ConfigError for SFT, which evaluates itself, a checkpoint that is not there, and a run without a moving
    average; CheckpointError, ModelError, PromptError or RewardError for what cannot be used.
    """
    from verst.loops.evaluate import evaluate as evaluated
    from verst.loops.run_folder import stored_recipe

    run = None if isinstance(target, RlRecipe | SftRecipe) else Path(target)
    recipe = target if isinstance(target, RlRecipe | SftRecipe) else stored_recipe(Path(target))
    return wait_for(lambda: evaluated(recipe, run, checkpoint=str(checkpoint), ema=ema))


def export(
    run: str | Path,
    out: str | Path,
    *,
    what: Literal["auto", "lora", "pipeline"] = "auto",
    checkpoint: str | int = "newest",
    ema: bool = False,
) -> Exported:
    """Write a checkpoint as what plain diffusers loads. What `verst export` does.

    lora: `pytorch_lora_weights.safetensors`; pipeline: a whole model folder, a LoRA merged into it; auto: lora where one was
    trained. out: a folder that does not exist; it is written whole or not at all. checkpoint, ema: as for `evaluate`.

    Raises ConfigError for a folder that is no RL run, an `out` that exists, and what the run does not have;
    CheckpointError for a damaged checkpoint.
    """
    from verst.loops.run_folder import stored_rl_recipe
    from verst.trainer.export import export as write

    folder = Path(run)
    return write(folder, stored_rl_recipe(folder), Path(out), what=what, which=str(checkpoint), ema=ema)


def triage(run: str | Path) -> Triage:
    """Where a run's time went, what bounds it, and which keys of its recipe would save how much; the run may still go on.

    Raises ConfigError for a folder that is no RL run, or whose first iteration is not over.
    """
    from verst.loops.timing import triage_run

    return triage_run(Path(run))


def trace(run: str | Path, out: str | Path | None = None) -> Path:
    """Write a run's spans as a file that ui.perfetto.dev shows; unset: trace.json in the run folder. Raises ConfigError."""
    from verst.loops.timing import trace_run

    return trace_run(Path(run), None if out is None else Path(out))[0]


def replay(run: str | Path, iteration: int | None = None) -> Replay:
    """Make recorded iterations again, from the newest checkpoint before them, and compare metrics and weights bit for bit.

    iteration: the last one; unset: that of the newest checkpoint. Raises ConfigError where the run has not made it.
    """
    from verst.loops.replay import replay as replayed

    return wait_for(lambda: replayed(Path(run), iteration))


def explain_ratio(run: str | Path, iteration: int, group: int, index: int) -> Explanation:
    """Make one sample again in engine and trainer: its ratio step by step, and the first block and tensor that differ.

    iteration: from 1; the checkpoint before it must be kept. group, index: of the sample, from 0. Raises ConfigError.
    """
    from verst.loops.explain import explain_ratio as explained

    return explained(Path(run), iteration, group, index)


def write_page(runs: str | Path | Sequence[str | Path], out: str | Path, *, max_mb: float = 20.0) -> Path:
    """The dashboard's page of run folders, or folders of them, as one HTML file. What `verst dashboard --export` does.

    max_mb: samples are left out beyond. Raises ConfigError where there is no run, or the numbers alone are larger.
    """
    from verst.dashboard.export import export as write
    from verst.dashboard.run import find_runs

    paths = [runs] if isinstance(runs, str | Path) else runs
    write(find_runs([Path(path) for path in paths]), Path(out), max_bytes=int(max_mb * 1e6))
    return Path(out)
