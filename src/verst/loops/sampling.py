"""Pictures from a model in this process, and the held-out reward of them: what an engine does, without one."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verst.config.recipe import SftRecipe, reward_name
from verst.config.sections import SizedSamplingConfig
from verst.errors import RewardError
from verst.families import Components
from verst.families.base import to_uint8
from verst.flow.denoise import denoise
from verst.flow.noise import SampleNoise, derive_seed
from verst.loops.forward import velocity
from verst.obs.samples import ShownSample
from verst.rewards.base import RewardBatch
from verst.rewards.local import LocalRewards
from verst.rollout.prompts import Prompt
from verst.trainer.rl import DTYPES
from verst.types import Conditioning, Geometry, Latents


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    reward: float
    """Mean of `totals` over the prompts that were scored."""
    by_reward: dict[str, float]
    """reward name -> mean over the prompts it could score."""
    prompts: list[str]
    totals: list[float]
    """One a prompt: the weighted sum over rewards; NaN where one of them failed and was masked."""
    by_sample: Mapping[str, Sequence[float]]
    """reward name -> one a prompt."""
    seeds: list[int]
    """One a prompt, of its noise."""
    media: Tensor
    """uint8 [N, F, H, W, 3], one a prompt."""
    fps: float | None
    """Of clips."""

    def shown(self, num: int) -> list[ShownSample]:
        """The first `num`, for the report."""
        return [
            ShownSample(
                media=self.media[i].numpy(),
                prompt=self.prompts[i],
                seed=self.seeds[i],
                reward=self.totals[i],
                rewards={name: values[i] for name, values in self.by_sample.items()},
                fps=self.fps,
            )
            for i in range(min(num, len(self.prompts)))
        ]


class HeldOut:
    """The same prompts with the same noise every time: two readings differ by the weights alone."""

    def __init__(self, prompts: Sequence[Prompt], recipe: SftRecipe) -> None:
        """Loads the rewards. Raises ConfigError or RewardError."""
        self._prompts = [prompt.text for prompt in prompts]
        self._metadata = tuple(prompt.metadata for prompt in prompts)
        self._recipe = recipe
        self._rewards = LocalRewards(recipe.rewards)

    @torch.no_grad()
    def evaluate(self, components: Components) -> Evaluation:
        """ODE samples of every prompt, `eval.batch_size` at a time, scored. Raises RewardError."""
        recipe, batches = self._recipe, list[Latents]()
        seeds = [derive_seed(recipe.eval.seed, "eval", i) for i in range(len(self._prompts))]
        for start in range(0, len(self._prompts), recipe.eval.batch_size):
            prompts = self._prompts[start : start + recipe.eval.batch_size]
            batches.append(
                sample_latents(
                    components,
                    prompts,
                    seeds=seeds[start : start + len(prompts)],
                    sampling=recipe.sampling,
                    max_sequence_length=recipe.model.max_sequence_length,
                    dtype=DTYPES[recipe.model.dtype],
                )
            )
        media = torch.cat([to_uint8(components.family.decode_pixels(components, batch)).cpu() for batch in batches])
        latents = {name: torch.cat([batch[name].float().cpu() for batch in batches]) for name in batches[0]}
        scores = asyncio.run(self._rewards.score(self._batch(media, latents))).by_reward
        weights = {reward_name(config): config.weight for config in recipe.rewards}
        totals = [sum(weights[n] * scores[n][i] for n in weights) for i in range(len(self._prompts))]
        return Evaluation(
            reward=_mean_of_finite("total", totals),
            by_reward={name: _mean_of_finite(name, values) for name, values in scores.items()},
            prompts=self._prompts,
            totals=totals,
            by_sample=scores,
            seeds=seeds,
            media=media,
            fps=recipe.sampling.fps,
        )

    def _batch(self, media: Tensor, latents: Latents) -> RewardBatch:
        return RewardBatch(media=media, prompts=tuple(self._prompts), metadata=self._metadata, latents=latents)


def _mean_of_finite(name: str, values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        raise RewardError(f"reward {name} could score none of {len(values)} held-out pictures")
    return sum(finite) / len(finite)


@torch.no_grad()
def sample_latents(
    components: Components,
    prompts: Sequence[str],
    *,
    seeds: Sequence[int],
    sampling: SizedSamplingConfig,
    max_sequence_length: int,
    dtype: torch.dtype = torch.float32,
) -> Latents:
    """One ODE sample a prompt in one batch, not decoded: stream -> [B, ...] on the model's device.

    seeds: B; the starting noise of each sample is drawn on the CPU from its own, so that it is the same on any device.
    dtype: what the transformer computes in.
    """
    family, device = components.family, components.device
    geometry = Geometry(height=sampling.height, width=sampling.width, num_frames=sampling.num_frames, fps=sampling.fps)
    conditioning = _condition(components, prompts, geometry, sampling, max_sequence_length)
    shapes = family.latent_shapes(components, geometry)
    noise = SampleNoise(seeds)
    latents = {stream: noise.initial(shape).to(device) for stream, shape in shapes.items()}

    def step(x: Latents, sigmas: dict[str, Tensor]) -> Latents:
        scale = sampling.guidance_scale
        return velocity(components, components.transformer, x, sigmas, conditioning, guidance_scale=scale, dtype=dtype)

    schedulers = family.schedule(components, geometry, num_steps=sampling.num_steps, shift=sampling.sigma_shift)
    return denoise(step, latents, schedulers)


def _condition(
    components: Components,
    prompts: Sequence[str],
    geometry: Geometry,
    sampling: SizedSamplingConfig,
    max_sequence_length: int,
) -> Conditioning:
    family = components.family
    encode = functools.partial(
        family.encode_prompts, components, max_sequence_length=max_sequence_length, geometry=geometry
    )
    negative = None
    if sampling.guidance_scale > family.unguided_scale:
        negative = encode([sampling.negative_prompt] * len(prompts), negative=True)
    return Conditioning(positive=encode(prompts), negative=negative, geometry=geometry)
