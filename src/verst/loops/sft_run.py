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
from torch import Tensor, nn

from verst.config import missing_files
from verst.config.recipe import SftRecipe
from verst.config.sections import LoraFinetune
from verst.errors import ConfigError, InvariantError, PromptError
from verst.families import ALL_PARTS, Components, recognise
from verst.families.base import ANY_IMAGES
from verst.families.tiny import build_glyphs
from verst.loops.autoencoder import train_autoencoder
from verst.loops.pipeline_folder import save_pipeline
from verst.loops.report import HELDOUT, Report
from verst.loops.run_folder import RunFolder
from verst.loops.sampling import Evaluation, HeldOut
from verst.loops.text_lines import TextLines
from verst.obs.metrics import MetricsLog
from verst.rewards.preflight import check_rewards
from verst.rollout.prompts import Prompt, read_prompts
from verst.trainer import checkpoint
from verst.trainer.core import StepMetrics, Trainer
from verst.types import Geometry
from verst.weights.lora import LoraSpec, attach_lora

_TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


class SftRun:
    """What `train_sft` calls around the optimizer steps. Use as a context manager: it closes its files."""

    def __init__(self, recipe: SftRecipe, folder: RunFolder, *, quiet: bool) -> None:
        """Raises ConfigError, ModelError, PromptError or RewardError for what cannot work, before any training."""
        missing = missing_files(recipe)
        if missing:
            raise ConfigError("\n".join(missing))
        self._recipe = recipe
        self._folder = folder
        self._device = _device(recipe)
        torch.set_num_threads(recipe.run.threads or len(os.sched_getaffinity(0)))
        torch.manual_seed(recipe.run.seed)
        captions, prompts = _prompts(recipe)
        size = recipe.sampling
        self.data = TextLines(captions, recipe.data.fonts, height=size.height, width=size.width)
        self._heldout = HeldOut(prompts, recipe)
        self.components = _load(recipe, self._device, [*captions, *(prompt.text for prompt in prompts)])
        trained = _trained_modules(self.components, recipe)
        self.trainer = Trainer(trained, recipe.trainer, total_steps=recipe.run.iterations)
        self.pipeline = folder.path / "pipeline"
        """Where the result goes."""
        self._last_step_s = time.perf_counter()
        self._report = Report(recipe, folder, quiet=quiet)

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
            state = checkpoint.read_state(latest)
            checkpoint.read_tensors(latest, self._tensors(), alone=True)
            self.components.modules["vae"].register_to_config(**state["autoencoder"])
            self.trainer.num_steps = int(state["iteration"])
            self._report.resume_at(self.trainer.num_steps)
            return self.trainer.num_steps
        self._report.resume_at(-1)
        if self._recipe.autoencoder.steps:
            self._train_autoencoder()
        with self._evaluated_weights():
            self._report.iteration(0, self._evaluate(self.components, 0))
        self._last_step_s = time.perf_counter()
        return 0

    def after_step(self, iteration: int, step: StepMetrics) -> bool:
        """Report, evaluate and save what is due; True when the stop rule is met and the pipeline is written.

        Raises InvariantError when the rule cannot be met any more.
        """
        recipe = self._recipe
        last = iteration == recipe.run.iterations
        metrics = step_metrics(step) | {"perf/iteration_s": time.perf_counter() - self._last_step_s}
        stop = False
        if iteration % recipe.eval.every == 0 or last:
            with self._evaluated_weights():
                metrics |= self._evaluate(self.components, iteration)
                stop = self._reached_stop(iteration, metrics)
        self._report.iteration(iteration, metrics)
        if iteration % recipe.checkpoint.every == 0 or last:
            self._save_checkpoint(iteration)
        self._last_step_s = time.perf_counter()
        return stop

    def end(self, iteration: int, *, stopped: bool) -> Path:
        """The written pipeline. Raises InvariantError when a stop rule was set and never met."""
        at_least = self._recipe.stop.reward_at_least
        if not stopped and at_least is not None:
            raise InvariantError(
                f"the held-out reward never reached stop.reward_at_least = {at_least} in {iteration} steps; raise "
                "run.iterations and start again: the run goes on from its checkpoint"
            )
        if not stopped:
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
        evaluation: Evaluation = self._heldout.evaluate(components)
        shown = slice(0, self._recipe.eval.grid)
        self._report.pictures(
            iteration, evaluation.media[shown, 0].numpy(), evaluation.prompts[shown], evaluation.totals[shown]
        )
        named = {f"{HELDOUT}/{name}": value for name, value in evaluation.by_reward.items()}
        return {HELDOUT: evaluation.reward, **named, "perf/eval_s": time.perf_counter() - started_s}

    def _train_autoencoder(self) -> None:
        config, seed = self._recipe.autoencoder, self._recipe.run.seed
        self._report.status(f"training the autoencoder for {config.steps} steps")
        (log := self._folder.path / "autoencoder.jsonl").unlink(missing_ok=True)
        with MetricsLog(log) as metrics:
            train_autoencoder(
                self.components,
                self.data,
                config,
                seed=seed,
                report=lambda step, values: metrics.append(step, step_metrics(values)),
            )

    def _save_pipeline(self) -> None:
        save_pipeline(self.components, self.pipeline, dtype=getattr(torch, self._recipe.save_dtype))

    def _save_checkpoint(self, iteration: int) -> None:
        root, config = self._folder.checkpoints, self.components.modules["vae"].config
        checkpoint.write_tensors(checkpoint.partial_folder(root, iteration), self._tensors(), alone=True)
        scale = {"shift_factor": config.shift_factor, "scaling_factor": config.scaling_factor}
        state = {"iteration": iteration, "autoencoder": scale}
        checkpoint.publish(root, iteration, state, keep=self._recipe.checkpoint.keep)

    def _tensors(self) -> dict[str, Tensor]:
        vae = self.components.modules["vae"].state_dict()
        return self.trainer.tensors() | {f"autoencoder.{name}": value for name, value in vae.items()}

    def _evaluated_weights(self) -> AbstractContextManager[None]:
        if self._recipe.eval.weights == "live":
            return nullcontext()
        assert self.trainer.ema is not None  # the recipe refuses anything else
        return self.trainer.ema.applied(self.trainer.named)


def step_metrics(step: StepMetrics) -> dict[str, float]:
    """Names of docs/metrics.md; the loss by quarter of the noise level where the quarter had a sample."""
    metrics = {"train/loss": step.loss, "train/grad_norm": step.grad_norm, "train/lr": step.lr}
    for key, count in step.sums.items():
        name = key.removeprefix("num/")
        if name != key and count > 0:
            metrics[f"train/loss_{name}"] = step.sums[f"sum/{name}"] / count
    return metrics


def _device(recipe: SftRecipe) -> torch.device:
    there = torch.cuda.is_available()
    if recipe.run.device == "cuda" and not there:
        raise ConfigError('run.device = "cuda", but torch sees no CUDA device; use "auto" or "cpu"')
    return torch.device("cuda" if there and recipe.run.device != "cpu" else "cpu")


def _prompts(recipe: SftRecipe) -> tuple[list[str], list[Prompt]]:
    """Captions to draw, and the held-out prompts that are evaluated. Raises PromptError when the two share one."""
    captions = [prompt.text for prompt in read_prompts(recipe.data.prompts)]
    heldout = read_prompts(recipe.prompts.heldout)
    shared = sorted(set(captions) & {prompt.text for prompt in heldout})
    if shared:
        raise PromptError(
            f"{len(shared)} held-out prompts of {recipe.prompts.heldout} are also drawn from {recipe.data.prompts}, "
            f"e.g. {shared[0]!r}: their reward would say nothing"
        )
    heldout = heldout[: recipe.eval.num_prompts]
    check_rewards(recipe.rewards, [p.text for p in heldout], [p.metadata for p in heldout])
    return captions, heldout


def _load(recipe: SftRecipe, device: torch.device, prompts: list[str]) -> Components:
    path = recipe.model.path
    if recipe.init == "glyphs" and not path.exists():
        build_glyphs(path, seed=recipe.run.seed)
    family = recognise(path)
    if family.streams != ("visual",) or family.num_images not in (0, ANY_IMAGES):
        raise ConfigError(
            f"model.path = {str(path)!r} is of the family {family.name}, which needs sound or condition images; data.type = "
            f"{recipe.data.type} has captions and pictures only"
        )
    components = family.load(path, parts=ALL_PARTS, dtype=torch.float32, device=device)
    family.check_geometry(components, Geometry(height=recipe.sampling.height, width=recipe.sampling.width))
    length = recipe.model.max_sequence_length
    if recipe.model.long_prompts == "refuse":
        problems = family.check_prompts(components, prompts, max_sequence_length=length)
        if problems:
            raise PromptError(
                f"{len(problems)} prompts do not fit the text encoders: {'; '.join(problems[:3])}. Shorten them, raise "
                "model.max_sequence_length, or set model.long_prompts = truncate"
            )
    return components


def _trained_modules(components: Components, recipe: SftRecipe) -> Mapping[str, nn.Module]:
    """The modules whose parameters are trained, and no others, now ask for gradients."""
    transformer, finetune = components.transformer, recipe.model.finetune
    if isinstance(finetune, LoraFinetune):
        targets = finetune.targets or components.family.lora_targets
        attach_lora(transformer, LoraSpec(rank=finetune.rank, alpha=finetune.alpha, targets=targets))
    else:
        transformer.requires_grad_(True)
    trained: dict[str, nn.Module] = {"transformer": transformer}
    if recipe.trainer.train_text_encoders:
        for name in _TEXT_ENCODERS:
            encoder: Any = components.modules.get(name)
            if encoder is not None:
                trained[name] = encoder.requires_grad_(True)
    return trained
