"""What a supervised run is made of, wired once: model, data, held-out set, trainer, reports, checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from verst.config import missing_files
from verst.config.supervised import SftRecipe
from verst.data.prefetch import Prefetcher
from verst.errors import ConfigError, InvariantError
from verst.families import ALL_PARTS, Components, recognise
from verst.flow.determinism import make_deterministic
from verst.loops.autoencoder import train_autoencoder
from verst.loops.pipeline_folder import save_pipeline
from verst.loops.report import HELDOUT, Report
from verst.loops.run_folder import RunFolder
from verst.loops.sampling import Evaluation, HeldOut
from verst.loops.sft_data import Batch
from verst.loops.sft_loss import LOSSES
from verst.loops.sft_model import arrange_blocks, load_model, pick_device, trained_modules
from verst.loops.sft_source import check_prompts, open_source, read_captions, read_heldout, refuse_shared
from verst.loops.trackers import check_trackers
from verst.obs.metrics import MetricsLog
from verst.obs.spans import DRIVER, TRAINER, lane_of
from verst.obs.waiting import Tell, waiting
from verst.trainer import checkpoint
from verst.trainer.core import StepMetrics, Trainer
from verst.trainer.scaler import make_scaler

_SHOWN = {
    "wait": "waiting for files to be read and encoded",
    "evaluate": "evaluating held-out samples",
    "checkpoint": "saving a checkpoint",
}
"""Phase -> what a live display says of it."""


class SftRun:
    """What `train_sft` calls around the optimizer steps. Use as a context manager: it closes its files."""

    def __init__(self, recipe: SftRecipe, folder: RunFolder, *, quiet: bool) -> None:
        """Raises ConfigError, ModelError, PromptError, DataError or RewardError for what cannot work, before training."""
        check_trackers(recipe.trackers)
        missing = missing_files(recipe)
        if missing:
            raise ConfigError("\n".join(missing))
        self._recipe = recipe
        self._folder = folder
        with waiting(quiet=quiet) as tell:
            self._open(tell)
        self._last_step_s = time.perf_counter()
        self._report = Report(recipe, folder, quiet=quiet)

    def _open(self, tell: Tell) -> None:
        """Model, data and trainer."""
        recipe, folder = self._recipe, self._folder
        self._device = pick_device(recipe)
        torch.set_num_threads(recipe.run.threads or len(os.sched_getaffinity(0)))
        if recipe.run.deterministic:
            make_deterministic(self._device)
        torch.manual_seed(recipe.run.seed)
        captions = read_captions(recipe)
        refuse_shared(recipe, captions)
        prompts = read_heldout(recipe)
        tell("loading the rewards")
        self._heldout = HeldOut(prompts, recipe) if recipe.rewards else None
        tell(f"loading {recipe.model.path}")
        self.components = load_model(recipe, self._device)
        tell("reading the data")
        self.source = open_source(recipe, self.components, folder.path, captions)
        self._cut = check_prompts(
            recipe,
            self.components,
            captions=captions or self.source.captions,
            prompts=[prompt.text for prompt in prompts],
        )
        refuse_shared(recipe, self.source.captions)
        trained = trained_modules(self.components, recipe)
        scaler = make_scaler(recipe.trainer.precision, forward=recipe.model.dtype)
        self.trainer = Trainer(trained, recipe.trainer, total_steps=recipe.run.iterations, scaler=scaler)
        self.loss = LOSSES[type(recipe.algorithm)](recipe, self.components, self.trainer)
        # After the frozen copy is made, which has no backward.
        arrange_blocks(self.components, recipe)
        self._heldout_loss = self.source.heldout_loss(tell)
        self.pipeline = folder.path / "pipeline"
        """Where the result goes."""

    def __enter__(self) -> SftRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._report.close()

    def start(self) -> int:
        """Optimizer steps done: those of the newest checkpoint, or 0 after the autoencoder's stage."""
        latest = self._folder.latest()
        if latest is not None:
            self._report.doing(f"loading {latest}")
            state = checkpoint.read_state(latest)
            checkpoint.read_tensors(latest, self._tensors(), alone=True)
            if self._recipe.autoencoder.steps:
                self.components.modules["vae"].register_to_config(**state["autoencoder"])
            self.trainer.num_steps = int(state["iteration"])
            self.source.resume_at(self.trainer.num_steps)
            self._report.resume_at(self.trainer.num_steps)
            return self.trainer.num_steps
        self._report.resume_at(-1)
        if self._recipe.autoencoder.steps:
            self._train_autoencoder()
        self._report.doing(_SHOWN["evaluate"])
        with self._evaluated_weights():
            self._report.iteration(0, self.source.facts() | self._cut | self._evaluate(self.components, 0))
        self._last_step_s = time.perf_counter()
        return 0

    def batches(self, iteration: int) -> Prefetcher[Batch]:
        """Those of the steps after `iteration`, made ahead."""
        last, ahead = self._recipe.run.iterations, self.source.prefetch
        return Prefetcher(self.source.batches.make, first=iteration, last=last, ahead=ahead)

    def after_step(self, iteration: int, step: StepMetrics, more: Mapping[str, float]) -> bool:
        """Report, evaluate and save what is due; True when the stop rule is met and the pipeline is written.

        Raises InvariantError when the rule cannot be met any more.
        """
        recipe = self._recipe
        last = iteration == recipe.run.iterations
        metrics = step_metrics(step) | dict(more) | {"perf/iteration_s": time.perf_counter() - self._last_step_s}
        stop = False
        if iteration % recipe.eval.every == 0 or last:
            with self.phase("evaluate", iteration), self._evaluated_weights():
                metrics |= self._evaluate(self.components, iteration)
                stop = self._reached_stop(iteration, metrics)
        self._report.iteration(iteration, metrics)
        if iteration % recipe.checkpoint.every == 0 or last:
            with self.phase("checkpoint", iteration):
                self._save_checkpoint(iteration)
        self._last_step_s = time.perf_counter()
        return stop

    def phase(self, name: str, iteration: int) -> AbstractContextManager[None]:
        """Takes down a span, and says what it is where a person looks."""
        if name in _SHOWN:
            self._report.doing(_SHOWN[name])
        kind = TRAINER if name == "train" else DRIVER
        return self._report.spans.span(name, lane=lane_of(kind, 0), iteration=iteration)

    def pause(self, iteration: int) -> None:
        """A checkpoint of here, where there is none yet."""
        if self._folder.latest() != checkpoint.step_folder(self._folder.checkpoints, iteration):
            self._save_checkpoint(iteration)
        self._report.status(f"stopped after iteration {iteration}; the same command goes on from there")

    def end(self, iteration: int, *, stopped: bool) -> Path:
        """The written pipeline. Raises InvariantError when a stop rule was set and never met."""
        at_least = self._recipe.stop.reward_at_least
        if not stopped and at_least is not None:
            raise InvariantError(
                f"the held-out reward never reached stop.reward_at_least = {at_least} in {iteration} steps; raise "
                "run.iterations and start again: the run goes on from its checkpoint"
            )
        if not stopped:
            self._report.doing("writing the pipeline")
            with self._evaluated_weights():
                self._save_pipeline()
        self._report.finish(iteration, early=stopped, result=self.pipeline)
        return self.pipeline

    def _reached_stop(self, iteration: int, metrics: dict[str, float]) -> bool:
        """Where the reward is high enough: save, evaluate what was saved (it is rounded), and judge that."""
        stop = self._recipe.stop
        if stop.reward_at_least is None or metrics[HELDOUT] < stop.reward_at_least:
            return False
        self._save_pipeline()
        saved = recognise(self.pipeline).load(self.pipeline, parts=ALL_PARTS, dtype=torch.float32, device=self._device)
        assert self._heldout is not None  # the recipe refuses a stop rule without rewards
        reward = self._heldout.evaluate(saved).reward
        metrics[f"{HELDOUT}_saved"] = reward
        if stop.reward_at_most is not None and reward > stop.reward_at_most:
            raise InvariantError(
                f"step {iteration}: the held-out reward is {reward:.3f}, above stop.reward_at_most = "
                f"{stop.reward_at_most}, and was below stop.reward_at_least = {stop.reward_at_least} before; "
                f"lower eval.every = {self._recipe.eval.every} or trainer.lr"
            )
        return reward >= stop.reward_at_least

    def _evaluate(self, components: Components, iteration: int) -> dict[str, float]:
        started_s = time.perf_counter()
        metrics = self._heldout_loss.evaluate(self.loss) if self._heldout_loss is not None else {}
        if self._heldout is not None:
            evaluation: Evaluation = self._heldout.evaluate(components)
            self._report.heldout(iteration, evaluation.shown(self._recipe.eval.num_pictures))
            metrics |= {f"{HELDOUT}/{name}": value for name, value in evaluation.by_reward.items()}
            metrics[HELDOUT] = evaluation.reward
        return metrics | {"perf/eval_s": time.perf_counter() - started_s}

    def _train_autoencoder(self) -> None:
        config, seed = self._recipe.autoencoder, self._recipe.run.seed
        self._report.status(f"training the autoencoder for {config.steps} steps")
        (log := self._folder.path / "autoencoder.jsonl").unlink(missing_ok=True)
        with MetricsLog(log) as metrics:
            assert self.source.drawn is not None  # the recipe refuses another source
            train_autoencoder(
                self.components,
                self.source.drawn,
                config,
                seed=seed,
                report=lambda step, values: metrics.append(step, step_metrics(values)),
            )

    def _save_pipeline(self) -> None:
        save_pipeline(self.components, self.pipeline, dtype=getattr(torch, self._recipe.save_dtype))

    def _save_checkpoint(self, iteration: int) -> None:
        root, state = self._folder.checkpoints, dict[str, Any](iteration=iteration)
        checkpoint.write_tensors(checkpoint.partial_folder(root, iteration), self._tensors(), alone=True)
        if self._recipe.autoencoder.steps:
            config = self.components.modules["vae"].config
            state["autoencoder"] = {"shift_factor": config.shift_factor, "scaling_factor": config.scaling_factor}
        checkpoint.publish(root, iteration, state, keep=self._recipe.checkpoint.keep)

    def _tensors(self) -> dict[str, Tensor]:
        """Of the autoencoder only what this run trained."""
        vae = self.components.modules["vae"].state_dict() if self._recipe.autoencoder.steps else {}
        return self.trainer.tensors() | {f"autoencoder.{name}": value for name, value in vae.items()}

    def _evaluated_weights(self) -> AbstractContextManager[None]:
        if self._recipe.eval.weights == "live":
            return nullcontext()
        assert self.trainer.ema is not None  # the recipe refuses anything else
        return self.trainer.ema.applied(self.trainer.named)


def step_metrics(step: StepMetrics) -> dict[str, float]:
    """Names of docs/metrics.md; the loss by quarter of the noise level where the quarter had a sample."""
    metrics = {"train/loss": step.loss, "train/lr": step.lr}
    if step.grad_norm is not None:
        metrics["train/grad_norm"] = step.grad_norm
    metrics |= {f"train/{name}": value for name, value in step.scaling.items()}
    for key, value in step.sums.items():
        kind, _, name = key.partition("/")
        if kind == "num" and value > 0:
            metrics[f"train/loss_{name}"] = step.sums[f"sum/{name}"] / value
        elif kind == "mean":
            metrics[f"train/{name}"] = value
    return metrics
