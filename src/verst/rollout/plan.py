"""What a rollout consists of: a pure function of the recipe and the rollout's number, so that resume needs no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verst.config import sections as s
from verst.config.recipe import RlRecipe
from verst.engine.wire import GenerateRequest
from verst.flow import strategies
from verst.flow.noise import derive_seed
from verst.rollout.prompts import Prompt, PromptSource
from verst.types import SampleKey


@dataclass(frozen=True, kw_only=True)
class MicrogroupTask:
    """One engine request and the samples it stands for."""

    keys: tuple[SampleKey, ...]
    prompts: tuple[str, ...]
    """One a sample; all the same in training."""
    metadata: tuple[Mapping[str, Any], ...]
    """One a sample: the other columns of its prompt row, for rewards."""
    request: GenerateRequest

    @property
    def rollout(self) -> int:
        return self.keys[0].rollout

    @property
    def group(self) -> int:
        return self.keys[0].group


STRATEGIES: dict[type[s.Section], Callable[..., strategies.StepDraw]] = {
    s.AllSteps: strategies.all_steps,
    s.WindowSteps: strategies.window,
    s.RandomSteps: strategies.random_subset,
    s.SlidingSteps: strategies.sliding_window,
    s.BranchSteps: strategies.branch,
    s.NoSteps: strategies.no_steps,
}
"""Section -> strategy, whose arguments are the section's keys."""


def step_draw(config: s.StepsConfig) -> strategies.StepDraw:
    """The strategy that a recipe names."""
    return STRATEGIES[type(config)](**config.model_dump(exclude={"type"}))


def plan_rollout(recipe: RlRecipe, source: PromptSource, rollout: int) -> list[MicrogroupTask]:
    """All microgroups of a rollout, by group and index.

    Seeds depend on (run seed, rollout, group, index) alone. With a shared initial noise, and with branch steps, all
    samples of a group start from the seed of the group.
    """
    tasks = []
    draw = step_draw(recipe.sampling.steps)
    for group in range(recipe.rollout.num_groups):
        prompt = source.at(rollout * recipe.rollout.num_groups + group)
        steps = draw(recipe.run.seed, rollout, group, recipe.sampling.num_steps)
        for start in range(0, recipe.rollout.group_size, recipe.rollout.microgroup_size):
            indices = range(start, start + recipe.rollout.microgroup_size)
            keys = tuple(SampleKey(rollout=rollout, group=group, index=i) for i in indices)
            tasks.append(_training_task(recipe, keys, prompt, steps))
    return tasks


def _training_task(
    recipe: RlRecipe, keys: tuple[SampleKey, ...], prompt: Prompt, steps: tuple[int, ...]
) -> MicrogroupTask:
    seed = recipe.run.seed
    seeds = [derive_seed(seed, "sample", k.rollout, k.group, k.index) for k in keys]
    shared = derive_seed(seed, "group", keys[0].rollout, keys[0].group)
    branch = isinstance(recipe.sampling.steps, s.BranchSteps)
    share = recipe.sampling.shared_initial_noise or branch
    # Without a trained step only what came out is used.
    kept = sorted({i + shift for i in steps for shift in (0, 1)}) or [recipe.sampling.num_steps]
    request = GenerateRequest(
        **_common(recipe, seeds),
        prompt=prompt.text,
        image_path=condition_images(prompt),
        key=(keys[0].rollout, keys[0].group),
        initial_seeds=(shared,) * len(keys) if share else None,
        rollout=True,
        rollout_sde_type=recipe.sampling.transition.type,
        rollout_noise_level=recipe.sampling.transition.eta,
        rollout_sde_step_indices=steps,
        rollout_return_step_indices=tuple(kept),
        rollout_return_dit_trajectory=True,
        rollout_return_denoising_env=True,
        share_denoising_env=True,
        rollout_storage_dtype=recipe.sampling.storage_dtype,
        rollout_log_prob_reduction=recipe.sampling.log_prob_reduction,
        rollout_share_prefix=branch,
    )
    count = len(keys)
    return MicrogroupTask(
        keys=keys, prompts=(prompt.text,) * count, metadata=(prompt.metadata,) * count, request=request
    )


def condition_images(prompt: Prompt) -> list[str] | None:
    """A row's `image`: one path or a list of them, for families that edit a picture or start from one."""
    image = prompt.metadata.get("image")
    if image is None or isinstance(image, list):
        return image
    return [str(image)]


def plan_evaluation(recipe: RlRecipe, prompts: Sequence[Prompt]) -> list[MicrogroupTask]:
    """Held-out prompts by deterministic sampling from fixed noise: the same pictures every time for the same weights.

    Up to `eval.batch_size` prompts share a request; one with a condition image has a request of its own.
    """
    tasks = []
    for start, batch in _evaluation_batches(prompts, size=recipe.eval.batch_size):
        seeds = [derive_seed(recipe.eval.seed, "eval", start + i) for i in range(len(batch))]
        keys = tuple(SampleKey(rollout=-1, group=start + i, index=0) for i in range(len(batch)))
        texts = tuple(prompt.text for prompt in batch)
        request = GenerateRequest(
            **_common(recipe, seeds), prompts=texts, image_path=condition_images(batch[0]), rollout=False
        )
        metadata = tuple(prompt.metadata for prompt in batch)
        tasks.append(MicrogroupTask(keys=keys, prompts=texts, metadata=metadata, request=request))
    return tasks


def _evaluation_batches(prompts: Sequence[Prompt], *, size: int) -> list[tuple[int, list[Prompt]]]:
    """(position of the first, prompts that share a request), in order."""
    batches: list[tuple[int, list[Prompt]]] = []
    for position, prompt in enumerate(prompts):
        alone = condition_images(prompt) is not None
        if not batches or alone or len(batches[-1][1]) == size or condition_images(batches[-1][1][0]) is not None:
            batches.append((position, []))
        batches[-1][1].append(prompt)
    return batches


def _common(recipe: RlRecipe, seeds: Sequence[int]) -> dict[str, Any]:
    sampling = recipe.sampling
    return {
        "negative_prompt": sampling.negative_prompt,
        "seeds": tuple(seeds),
        "generator_device": "cpu",
        "height": sampling.height,
        "width": sampling.width,
        "num_frames": sampling.num_frames,
        "fps": sampling.fps,
        "num_inference_steps": sampling.num_steps,
        "guidance_scale": sampling.guidance_scale,
        "sigma_shift": sampling.sigma_shift,
        "max_sequence_length": recipe.model.max_sequence_length,
        "long_prompts": recipe.model.long_prompts,
        "rollout_debug_mode": False,
        "media_format": "uint8",
    }
