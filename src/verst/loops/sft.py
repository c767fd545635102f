"""A supervised run: captions and pictures in, a diffusers pipeline out. One process, no Ray.

captions ──> pictures ──> x0 (autoencoder) ──┐
    └──────> text encoders (trained too) ────┤
noise eps, level sigma ──────────────────────┴─> velocity ──> |v - (eps - x0)|^2 ──> AdamW, EMA
                                                   every few steps: held-out reward ──> save, stop
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verst.algorithms.sft import draw_sigmas, noised, velocity_loss
from verst.config.recipe import SftRecipe
from verst.families import Components
from verst.flow.noise import derive_seed
from verst.loops.run_folder import RunFolder
from verst.loops.sft_run import SftRun
from verst.loops.text_lines import TextLines
from verst.trainer.core import TileLoss
from verst.types import Conditioning, Geometry, Latents

_NUM_SIGMA_BUCKETS = 4
"""The loss is also reported by quarter of the noise level: the quarters differ in size, and a mean hides which moves."""


def train_sft(recipe: SftRecipe, folder: RunFolder, *, quiet: bool = False) -> Path:
    """Run to the end or the stop rule; returns the folder of the trained pipeline, `<run folder>/pipeline`.

    The same call on the same folder goes on from its newest checkpoint. Raises ConfigError, ModelError, PromptError
    or RewardError before any training for what is wrong with the recipe or its files; InvariantError when the loss is
    not finite or the stop rule cannot be met.
    """
    with SftRun(recipe, folder, quiet=quiet) as run:
        iteration, stopped = run.start(), False
        while iteration < recipe.run.iterations and not stopped:
            batch = make_batch(run.components, run.data, recipe, iteration)
            metrics = run.trainer.step(make_tiles(run.components, batch, recipe))
            iteration += 1
            stopped = run.after_step(iteration, metrics)
        return run.end(iteration, stopped=stopped)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One optimizer step's samples, on the model's device."""

    captions: list[str]
    """B; empty where the caption was dropped."""
    x0: Latents
    """stream -> [B, ...] fp32, normalised clean latents."""
    eps: Latents
    """stream -> [B, ...] fp32, standard normal."""
    sigma: Tensor
    """[B] fp32 in [0, 1]."""
    geometry: Geometry


def make_batch(components: Components, data: TextLines, recipe: SftRecipe, step: int) -> Batch:
    """Pictures, noise, noise levels and dropped captions: drawn on the CPU, from (run seed, step) alone."""
    config, seed = recipe.algorithm, derive_seed(recipe.run.seed, "sft", step)
    generator = torch.Generator().manual_seed(seed)
    size, device = config.batch_size, components.device
    captions, media = data.batch(size, seed=derive_seed(seed, "pictures"))
    x0 = components.family.encode_media(components, media)
    eps = {stream: torch.randn(x.shape, generator=generator).to(device) for stream, x in x0.items()}
    sigma = draw_sigmas(config.sigma, torch.rand(size, generator=generator)).to(device)
    dropped = torch.rand(size, generator=generator) < config.caption_dropout
    kept = ["" if drop else caption for caption, drop in zip(captions, dropped.tolist(), strict=True)]
    geometry = Geometry(height=media.shape[2], width=media.shape[3], num_frames=media.shape[1])
    return Batch(captions=kept, x0=x0, eps=eps, sigma=sigma, geometry=geometry)


def make_tiles(components: Components, batch: Batch, recipe: SftRecipe) -> list[Callable[[], TileLoss]]:
    """Closures over `trainer.tile_size` samples each, whose losses add up to the batch's mean."""
    size = recipe.trainer.tile_size
    tile = functools.partial(tile_loss, components, batch, max_sequence_length=recipe.model.max_sequence_length)
    return [functools.partial(tile, slice(start, start + size)) for start in range(0, len(batch.captions), size)]


def tile_loss(components: Components, batch: Batch, rows: slice, *, max_sequence_length: int) -> TileLoss:
    """Forward of some rows; the loss is the mean over streams and samples, times these rows' share of the batch."""
    family = components.family
    positive = family.encode_prompts(
        components, batch.captions[rows], max_sequence_length=max_sequence_length, geometry=batch.geometry
    )
    sigma = batch.sigma[rows]
    x = {stream: noised(x0[rows], batch.eps[stream][rows], sigma) for stream, x0 in batch.x0.items()}
    v = family.velocity(
        components.transformer,
        x,
        dict.fromkeys(x, sigma),
        Conditioning(positive=positive, negative=None, geometry=batch.geometry),
        guidance_scale=1.0,
    )
    losses = [velocity_loss(v[stream], x0[rows], batch.eps[stream][rows]) for stream, x0 in batch.x0.items()]
    per_sample = torch.stack(losses).mean(dim=0)
    return TileLoss(loss=per_sample.sum() / len(batch.captions), sums=_by_sigma(per_sample, sigma))


def _by_sigma(per_sample: Tensor, sigma: Tensor) -> dict[str, Tensor]:
    """`sum/sigma_i` and `num/sigma_i`: loss and count of the samples in each quarter of [0, 1]."""
    bucket = (sigma * _NUM_SIGMA_BUCKETS).long().clamp(max=_NUM_SIGMA_BUCKETS - 1)
    sums = {}
    for index in range(_NUM_SIGMA_BUCKETS):
        inside = (bucket == index).float()
        sums[f"sum/sigma_{index}"] = (per_sample.detach() * inside).sum()
        sums[f"num/sigma_{index}"] = inside.sum()
    return sums
