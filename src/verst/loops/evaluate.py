"""Held-out reward of one model in this process: the run's own pipeline, without Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from verst.config.recipe import Recipe, RlRecipe, gold_names
from verst.engine.worker import Worker
from verst.errors import ConfigError
from verst.flow.determinism import make_deterministic
from verst.loops.local_engine import local_pipeline
from verst.loops.prompt_checks import check_prompts
from verst.loops.rl import heldout_metrics, wants_cuda
from verst.loops.start import with_files
from verst.obs.waiting import Tell, nobody
from verst.rewards.local import local_pools
from verst.rollout.plan import plan_evaluation
from verst.rollout.prompts import read_prompts
from verst.rollout.scoring import Scorer
from verst.trainer.export import find_checkpoint, load_trained
from verst.trainer.rl import DTYPES


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    metrics: dict[str, float]
    """Means over the held-out prompts, by the names of docs/metrics.md."""
    checkpoint: Path | None
    """Whose weights they are; None: those that the recipe starts from."""


async def evaluate(recipe: Recipe, run: Path | None, *, checkpoint: str, ema: bool, tell: Tell = nobody) -> Evaluation:
    """A checkpoint of a run; without one the model that the recipe starts from, which the hub may have.

    checkpoint: as for `find_checkpoint`. ema: the moving average of the weights. Raises ConfigError for a recipe of SFT, a
    checkpoint or a file of the recipe that is not there, and what an untrained model cannot have.
    """
    if not isinstance(recipe, RlRecipe):
        raise ConfigError(f"{run or recipe.run.name} is an SFT recipe, which evaluates itself while it trains")
    if run is None:
        for asked, said in ((checkpoint != "newest", f"checkpoint = {checkpoint}"), (ema, "ema")):
            if asked:
                raise ConfigError(
                    f"{said}: {recipe.run.name} is a recipe, whose untrained model is evaluated; name a run"
                )
        tell(f"looking for {recipe.model.path}")
        recipe = with_files(recipe)
        assert isinstance(recipe, RlRecipe)
    folder = None if run is None else find_checkpoint(run, checkpoint)
    metrics = await evaluate_model(recipe, checkpoint=folder, ema=ema, tell=tell)
    return Evaluation(metrics=metrics, checkpoint=folder)


async def evaluate_model(
    recipe: RlRecipe, *, checkpoint: Path | None, ema: bool, tell: Tell = nobody
) -> dict[str, float]:
    """Metric name -> mean over the held-out prompts; None evaluates the recipe's untrained model."""
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    device = "cuda" if wants_cuda(recipe) else "cpu"
    if recipe.run.deterministic:
        make_deterministic(torch.device(device))
    model = recipe.model
    tell(f"loading {model.path}")
    worker = Worker(
        model.path, dtype=DTYPES[model.dtype], fp32_modules=model.fp32_modules, device=device, compiled=model.compile
    )
    if checkpoint is not None:
        tell(f"loading {checkpoint}")
        load_trained(worker.components.transformer, recipe, checkpoint, ema=ema)
    heldout = read_prompts(recipe.prompts.heldout)[: recipe.eval.num_prompts]
    check_prompts(recipe, (), heldout)
    tell("loading the rewards")
    score = Scorer(
        recipe.judges, local_pools(recipe.judges), group_size=recipe.rollout.group_size, always=gold_names(recipe)
    )

    pipeline = local_pipeline(worker, score)
    tasks = plan_evaluation(recipe, heldout)
    made = 0

    def one_more() -> None:
        nonlocal made
        made += 1
        tell("sampling held-out prompts, batches", done=made, total=len(tasks))

    tell("sampling held-out prompts, batches", total=len(tasks))
    scored, _ = await pipeline.run(tasks, weight_version=worker.weight_version, on_generated=one_more)
    return heldout_metrics(recipe, scored)
