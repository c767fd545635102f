"""What a rollout consists of: a pure function of the recipe and the rollout's number, so that resume needs no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verst.config import sections as s
from verst.config.recipe import RlRecipe
from verst.engine.wire import GenerateRequest
from verst.flow import strategies
from verst.flow.noise import derive_seed
from verst.obs.spans import HELDOUT
from verst.rollout.columns import Overrides
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
    rewards: tuple[str, ...] | None = None
    """Names of the rewards that apply to the row; None: all of the recipe's."""
    request: GenerateRequest

    def without_conditioning(self) -> MicrogroupTask:
        """The same samples, where another microgroup of the group brings what all of them were conditioned on."""
        return replace(self, request=self.request.model_copy(update={"rollout_return_denoising_env": False}))

    @property
    def rollout(self) -> int:
        return self.keys[0].rollout

    @property
    def group(self) -> int:
        return self.keys[0].group

    @property
    def is_heldout(self) -> bool:
        """An evaluation's: its samples belong to no group."""
        return self.rollout == HELDOUT


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
    """All microgroups of a rollout without dynamic sampling, by group and index."""
    first = rollout * recipe.rollout.num_groups
    groups = range(recipe.rollout.num_groups)
    return [
        task for group in groups for task in plan_group(recipe, source.at(first + group), rollout=rollout, group=group)
    ]


def plan_group(recipe: RlRecipe, prompt: Prompt, *, rollout: int, group: int) -> list[MicrogroupTask]:
    """The microgroups of one group, by index; `group` is its number in the rollout.

    Seeds depend on (run seed, rollout, group, index) alone, or on the row's own seed in place of the run's. With a
    shared initial noise, and with branch steps, all samples of a group start from the seed of the group.
    """
    sampling = row_sampling(recipe, prompt)
    steps = step_draw(sampling.steps)(recipe.run.seed, rollout, group, sampling.num_steps)
    tasks = []
    for start in range(0, recipe.rollout.group_size, recipe.rollout.microgroup_size):
        indices = range(start, start + recipe.rollout.microgroup_size)
        keys = tuple(SampleKey(rollout=rollout, group=group, index=i) for i in indices)
        tasks.append(_training_task(recipe, keys, prompt, steps))
    return tasks


def row_sampling(recipe: RlRecipe, prompt: Prompt) -> s.SamplingConfig:
    """The recipe's sampling with what the row says instead. `rows.check_rows` has refused what does not fit."""
    return recipe.sampling.model_copy(update=prompt.overrides.sampling())


def _training_task(
    recipe: RlRecipe, keys: tuple[SampleKey, ...], prompt: Prompt, steps: tuple[int, ...]
) -> MicrogroupTask:
    sampling = row_sampling(recipe, prompt)
    seed = recipe.run.seed if prompt.overrides.seed is None else prompt.overrides.seed
    seeds = [derive_seed(seed, "sample", k.rollout, k.group, k.index) for k in keys]
    shared = derive_seed(seed, "group", keys[0].rollout, keys[0].group)
    branch = isinstance(sampling.steps, s.BranchSteps)
    share = sampling.shared_initial_noise or branch
    # Without a trained step only what came out is used.
    final = not steps or any(reward.sees_latents for reward in recipe.training_judges)
    kept = sorted({i + shift for i in steps for shift in (0, 1)} | ({sampling.num_steps} if final else set()))
    request = GenerateRequest(
        **_common(recipe, sampling, seeds),
        prompt=prompt.text,
        image_path=condition_images(prompt),
        key=(keys[0].rollout, keys[0].group),
        initial_seeds=(shared,) * len(keys) if share else None,
        rollout=True,
        rollout_sde_type=sampling.transition.type,
        rollout_noise_level=sampling.transition.eta,
        rollout_sde_step_indices=steps,
        rollout_return_step_indices=tuple(kept),
        rollout_return_dit_trajectory=True,
        rollout_return_denoising_env=True,
        share_denoising_env=True,
        rollout_storage_dtype=sampling.storage_dtype,
        rollout_log_prob_of=recipe.engine.log_prob_of,
        rollout_log_prob_reduction=sampling.log_prob_reduction,
        rollout_share_prefix=branch,
        return_media=recipe.decodes_rollouts,
    )
    count = len(keys)
    return MicrogroupTask(
        keys=keys,
        prompts=(prompt.text,) * count,
        metadata=(prompt.metadata,) * count,
        rewards=prompt.overrides.reward,
        request=request,
    )


def condition_images(prompt: Prompt) -> list[str] | None:
    """A row's pictures, for families that edit one or start from one."""
    return list(prompt.images) or None


def plan_evaluation(recipe: RlRecipe, prompts: Sequence[Prompt]) -> list[MicrogroupTask]:
    """Held-out prompts by deterministic sampling from fixed noise: the same pictures every time for the same weights.

    Up to `eval.batch_size` prompts of one geometry share a request, whose keys' groups say which they are; one with a
    condition image has a request of its own. `in_prompt_order` brings them back into order.
    """
    tasks = []
    for positions in _evaluation_batches(prompts, size=recipe.eval.batch_size):
        batch = [prompts[i] for i in positions]
        own = [prompt.overrides.seed for prompt in batch]
        seeds = [
            derive_seed(recipe.eval.seed if seed is None else seed, "eval", i)
            for i, seed in zip(positions, own, strict=True)
        ]
        keys = tuple(SampleKey(rollout=HELDOUT, group=i, index=0) for i in positions)
        texts = tuple(prompt.text for prompt in batch)
        sampling = row_sampling(recipe, batch[0])
        request = GenerateRequest(
            **_common(recipe, sampling, seeds),
            prompts=texts,
            image_path=condition_images(batch[0]),
            **_heldout_mode(recipe, sampling.num_steps),
        )
        metadata = tuple(prompt.metadata for prompt in batch)
        rewards = batch[0].overrides.reward
        tasks.append(MicrogroupTask(keys=keys, prompts=texts, metadata=metadata, rewards=rewards, request=request))
    return tasks


def _heldout_mode(recipe: RlRecipe, num_steps: int) -> dict[str, Any]:
    """Plain sampling; where a reward reads final latents a rollout of deterministic steps, which gives the same bits."""
    if not any(reward.sees_latents for reward in recipe.judges):
        return {"rollout": False}
    return {
        "rollout": True,
        "rollout_sde_type": "ode",
        "rollout_return_step_indices": (num_steps,),
        "rollout_return_dit_trajectory": True,
        "return_media": recipe.decodes_heldout,
    }


def _evaluation_batches(prompts: Sequence[Prompt], *, size: int) -> list[list[int]]:
    """Positions of the prompts that share a request."""
    batches: list[list[int]] = []
    open_batch: dict[Overrides, list[int]] = {}
    for position, prompt in enumerate(prompts):
        kind = replace(prompt.overrides, seed=None)
        batch = open_batch.get(kind)
        if prompt.images or batch is None or len(batch) == size:
            batch = []
            batches.append(batch)
            if not prompt.images:
                open_batch[kind] = batch
        batch.append(position)
    return batches


def _common(recipe: RlRecipe, sampling: s.SamplingConfig, seeds: Sequence[int]) -> dict[str, Any]:
    return {
        **({"guidance_passes": "two"} if recipe.guides_in_two_passes else {}),
        "negative_prompt": sampling.negative_prompt,
        "seeds": tuple(seeds),
        "generator_device": recipe.engine.noise_device,
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
