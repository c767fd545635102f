"""What a supervised run is made of, wired once: model, data, held-out set, trainer, run folder, checkpoints."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.config.load import missing_files
from verst.config.recipe import SftRecipe
from verst.config.sections import LoraFinetune
from verst.errors import ConfigError, InvariantError, PromptError
from verst.families import ALL_PARTS, Components, Geometry, recognise
from verst.families.tiny import build_glyphs
from verst.loops.autoencoder import train_autoencoder
from verst.loops.pipeline_folder import save_pipeline
from verst.loops.sampling import HeldOut
from verst.loops.text_lines import TextLines
from verst.rollout.prompts import read_prompts
from verst.trainer import checkpoint
from verst.trainer.core import StepMetrics, Trainer
from verst.weights.lora import LoraSpec, attach_lora

_TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_LOG_EVERY_S = 5.0
"""Seconds between progress lines."""


class SftRun:
    """Everything `train_sft` calls between two optimizer steps; it starts at its newest checkpoint."""

    def __init__(self, recipe: SftRecipe, progress: Callable[[str], None]) -> None:
        """Raises ConfigError, ModelError, PromptError or RewardError for what cannot work, before any training."""
        self.recipe = recipe
        self._progress = progress
        self._started_s = self._last_line_s = time.monotonic()
        self.device = _device(recipe)
        torch.set_num_threads(recipe.run.threads or len(os.sched_getaffinity(0)))
        torch.manual_seed(recipe.run.seed)
        missing = missing_files(recipe)
        if missing:
            raise ConfigError("\n".join(missing))
        captions, heldout = _prompts(recipe)
        size = recipe.sampling
        self.data = TextLines(captions, recipe.data.fonts, height=size.height, width=size.width)
        self.heldout = HeldOut(heldout, recipe)
        self.components = _load(recipe, self.device, [*captions, *heldout])
        self.trainer = Trainer(
            _trained_modules(self.components, recipe), recipe.trainer, total_steps=recipe.run.iterations
        )
        self.folder = recipe.run.folder / recipe.run.name
        self.pipeline = self.folder / "pipeline"
        """Where the result goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._checkpoints = self.folder / "checkpoints"
        if not self._resume() and recipe.autoencoder.steps:
            self._train_autoencoder()

    def reached_stop(self) -> bool:
        """Evaluate; where the reward is high enough, save, evaluate what was saved, and judge that.

        Raises InvariantError when it is above stop.reward_at_most: the step that was wanted has been passed.
        """
        recipe, stop, step = self.recipe, self.recipe.stop, self.trainer.num_steps
        with self._evaluated_weights():
            live = self.heldout.evaluate(self.components)
            self._log(step, {"heldout_reward": live.reward})
            if stop.reward_at_least is None or live.reward < stop.reward_at_least:
                return False
            self.save()
        saved = recognise(self.pipeline).load(self.pipeline, parts=ALL_PARTS, dtype=torch.float32, device=self.device)
        reward = self.heldout.evaluate(saved).reward
        self._log(step, {"saved_heldout_reward": reward})
        if stop.reward_at_most is not None and reward > stop.reward_at_most:
            raise InvariantError(
                f"step {step}: the held-out reward is {reward:.3f}, above stop.reward_at_most = {stop.reward_at_most}, "
                f"and was below stop.reward_at_least = {stop.reward_at_least} before; "
                f"lower eval.every = {recipe.eval.every} or trainer.lr"
            )
        return reward >= stop.reward_at_least

    def save(self) -> Path:
        """Write the pipeline folder with the weights that are in the modules now."""
        return save_pipeline(self.components, self.pipeline, dtype=getattr(torch, self.recipe.save_dtype))

    def save_last(self) -> Path:
        """After all iterations. Raises InvariantError when a stop rule was set, which then was never met."""
        at_least = self.recipe.stop.reward_at_least
        if at_least is not None:
            raise InvariantError(
                f"the held-out reward never reached stop.reward_at_least = {at_least} in {self.recipe.run.iterations} "
                "steps; raise run.iterations and start again: the run goes on from its checkpoint"
            )
        with self._evaluated_weights():
            return self.save()

    def after_step(self, metrics: StepMetrics) -> None:
        """Log the step, and write a checkpoint where one is due."""
        step = self.trainer.num_steps
        self._log(
            step,
            {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "lr": metrics.lr, **_means(metrics.sums)},
        )
        if step % self.recipe.checkpoint.every == 0 or step == self.recipe.run.iterations:
            partial = checkpoint.partial_folder(self._checkpoints, step)
            checkpoint.write_tensors(partial, self._tensors(), alone=True)
            config = self.components.modules["vae"].config
            scale = {"shift_factor": config.shift_factor, "scaling_factor": config.scaling_factor}
            checkpoint.publish(
                self._checkpoints, step, {"step": step, "autoencoder": scale}, keep=self.recipe.checkpoint.keep
            )

    def _resume(self) -> bool:
        checkpoint.sweep(self._checkpoints)
        found = checkpoint.published(self._checkpoints)
        if not found:
            return False
        state = checkpoint.read_state(found[-1])
        checkpoint.read_tensors(found[-1], self._tensors(), alone=True)
        self.components.modules["vae"].register_to_config(**state["autoencoder"])
        self.trainer.num_steps = state["step"]
        self._progress(f"going on from {found[-1]}")
        return True

    def _train_autoencoder(self) -> None:
        def report(step: int, metrics: StepMetrics) -> None:
            self._log(step, {"autoencoder_loss": metrics.loss, "autoencoder_grad_norm": metrics.grad_norm})

        recipe = self.recipe
        train_autoencoder(self.components, self.data, recipe.autoencoder, seed=recipe.run.seed, report=report)

    def _tensors(self) -> dict[str, Tensor]:
        vae = self.components.modules["vae"].state_dict()
        return self.trainer.tensors() | {f"autoencoder.{name}": value for name, value in vae.items()}

    def _evaluated_weights(self) -> AbstractContextManager[None]:
        if self.recipe.eval.weights == "live":
            return nullcontext()
        assert self.trainer.ema is not None  # the recipe refuses anything else
        return self.trainer.ema.applied(self.trainer.named)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_s = time.monotonic()
        row = {"step": step, "elapsed_s": round(now_s - self._started_s, 3), **metrics}
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if "heldout_reward" in metrics or now_s - self._last_line_s > _LOG_EVERY_S:
            self._last_line_s = now_s
            self._progress(f"step {step}: " + ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))


def _device(recipe: SftRecipe) -> torch.device:
    kind = recipe.run.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = cuda, but torch sees no CUDA device; use auto or cpu")
    return torch.device(kind)


def _prompts(recipe: SftRecipe) -> tuple[list[str], list[str]]:
    """Captions to draw, and held-out ones. Raises PromptError when the two share one."""
    captions = [prompt.text for prompt in read_prompts(recipe.data.prompts)]
    heldout = [prompt.text for prompt in read_prompts(recipe.prompts.heldout)]
    shared = sorted(set(captions) & set(heldout))
    if shared:
        raise PromptError(
            f"{len(shared)} held-out prompts of {recipe.prompts.heldout} are also drawn from {recipe.data.prompts}, "
            f"e.g. {shared[0]!r}: their reward would say nothing"
        )
    return captions, heldout


def _load(recipe: SftRecipe, device: torch.device, prompts: list[str]) -> Components:
    path = recipe.model.path
    if recipe.init == "glyphs" and not path.exists():
        build_glyphs(path, seed=recipe.run.seed)
    family = recognise(path)
    components = family.load(path, parts=ALL_PARTS, dtype=torch.float32, device=device)
    family.check_geometry(components, Geometry(height=recipe.sampling.height, width=recipe.sampling.width))
    if recipe.model.long_prompts == "refuse":
        problems = family.check_prompts(components, prompts, max_sequence_length=recipe.model.max_sequence_length)
        if problems:
            raise PromptError("\n".join(problems[:5]) + f"\n({len(problems)} in all; or long_prompts = truncate)")
    return components


def _trained_modules(components: Components, recipe: SftRecipe) -> dict[str, nn.Module]:
    """Modules whose parameters were just set to be trained."""
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


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """`loss_sigma_0` from `sum/sigma_0` and `num/sigma_0`, for the buckets that got a sample."""
    buckets = [key.removeprefix("num/") for key, count in sums.items() if key.startswith("num/") and count > 0]
    return {f"loss_{name}": sums[f"sum/{name}"] / sums[f"num/{name}"] for name in buckets}
