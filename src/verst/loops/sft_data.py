"""One optimizer step's samples: clean latents, noise, noise levels, captions. All follows from (run seed, step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from verst.algorithms.sft import draw_sigmas, grid_sigmas
from verst.config.supervised import SftRecipe
from verst.data.bad_files import BadFiles
from verst.data.dataset import FileDataset, cache_metrics
from verst.data.text_lines import TextLines
from verst.families import Components
from verst.flow.noise import derive_seed
from verst.types import Geometry, Latents


@dataclass(frozen=True, kw_only=True)
class Batch:
    """On the model's device."""

    captions: list[str]
    """B; empty where the caption was dropped."""
    x0: tuple[Latents, ...]
    """stream -> [B, ...] fp32, normalised clean latents; of preferences the chosen ones, then the rejected ones."""
    eps: Latents
    """stream -> [B, ...] fp32, standard normal; one for both sides of a preference."""
    sigmas: Latents
    """stream -> [B] fp32 in [0, 1]."""
    geometry: Geometry
    rows: dict[str, Tensor] | None = None
    """Conditioning [B, ...] by name; None: the captions are encoded with gradients, tile by tile."""
    metrics: dict[str, float] = field(default_factory=dict)


class Batches(Protocol):
    def make(self, step: int) -> Batch:
        """The batch of optimizer step `step`, counted from 0."""


class DrawnBatches:
    """Pictures of text lines, drawn on the CPU."""

    def __init__(self, components: Components, data: TextLines, recipe: SftRecipe) -> None:
        self._components, self._data, self._recipe = components, data, recipe

    def make(self, step: int) -> Batch:
        config, components = self._recipe.algorithm, self._components
        seed = derive_seed(self._recipe.run.seed, "sft", step)
        captions, media = self._data.batch(config.batch_size, seed=derive_seed(seed, "pictures"))
        x0 = components.family.encode_media(components, media)
        geometry = Geometry(height=media.shape[2], width=media.shape[3], num_frames=media.shape[1])
        noise = draw(components, x0, captions, geometry, self._recipe, seed)
        return Batch(x0=(x0,), geometry=geometry, **noise)


class FileBatches:
    """Items of files, read and encoded or taken from the caches."""

    def __init__(self, components: Components, data: FileDataset, recipe: SftRecipe, bad: BadFiles) -> None:
        self._components, self._data, self._recipe, self._bad = components, data, recipe, bad

    def make(self, step: int) -> Batch:
        found, data = self._data.batch(step), self._data
        seed = derive_seed(self._recipe.run.seed, "sft", step)
        captions = [item.caption for item in found.items]
        noise = draw(self._components, found.x0[0], captions, found.geometry, self._recipe, seed)
        rows = None if self._recipe.trainer.train_text_encoders else data.condition(found, noise["captions"])
        metrics = {
            "data/epoch": (step + 1) * len(captions) / data.num_items,
            "data/replaced": float(found.num_replaced),
            "data/bad_files": float(len(self._bad)),
            **cache_metrics(data.caches),
        }
        return Batch(x0=found.x0, geometry=found.geometry, rows=rows, metrics=metrics, **noise)


def draw(
    components: Components,
    x0: Latents,
    captions: Sequence[str],
    geometry: Geometry,
    recipe: SftRecipe,
    seed: int,
) -> dict[str, Any]:
    """Captions, eps and sigmas of a Batch, drawn on the CPU from `seed` alone."""
    config, size, device = recipe.algorithm, len(captions), components.device
    generator = torch.Generator().manual_seed(seed)
    eps = {stream: torch.randn(x.shape, generator=generator).to(device) for stream, x in x0.items()}
    uniform = torch.rand(size, generator=generator)
    dropped = torch.rand(size, generator=generator) < config.caption_dropout
    kept = ["" if drop else caption for caption, drop in zip(captions, dropped.tolist(), strict=True)]
    sigmas = {}
    for index, stream in enumerate(x0):
        if index and config.stream_sigmas == "independent":
            uniform = torch.rand(size, generator=generator)
        sigmas[stream] = _sigmas(components, geometry, recipe, stream, uniform).to(device)
    return {"captions": kept, "eps": eps, "sigmas": sigmas}


def _sigmas(components: Components, geometry: Geometry, recipe: SftRecipe, stream: str, uniform: Tensor) -> Tensor:
    config, sampling = recipe.algorithm, recipe.sampling
    if config.sigma == "grid":
        family = components.family
        grids = family.schedule(components, geometry, num_steps=sampling.num_steps, shift=sampling.sigma_shift)
        return grid_sigmas(grids[stream].sigmas[:-1], uniform)
    return draw_sigmas(
        config.sigma, uniform, mean=config.sigma_mean, std=config.sigma_std, shift=config.sigma_shift or 1.0
    )
