"""The memory of a supervised run before it starts: one process with the whole model, from its config files."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from verst.config import sections as s
from verst.config.data import FilesData
from verst.config.supervised import DpoOfflineConfig, SftRecipe
from verst.errors import ConfigError
from verst.families import Components, Family, recognise
from verst.families.skeleton import Skeletons
from verst.loops.memory_shapes import prepare, stored_bytes
from verst.trainer.estimate import Copies, HeldGradient, Item, Sizes, trainer_items
from verst.trainer.footprint import TileBytes, inputs_of, trace_tile
from verst.trainer.rl import DTYPES
from verst.types import Conditioning, Geometry, Latents

_OF_FSDP = ("gathered weights", "gradients of one block")
"""What a rank of FSDP2 holds and a run without it does not."""


def sft_items(recipe: SftRecipe) -> list[Item]:
    """Traces one tile. Not counted: what encodes the data, which is one item at a time, and evaluations.

    Raises ConfigError for text encoders that are trained too.
    """
    if recipe.trainer.train_text_encoders:
        raise ConfigError(
            "trainer.train_text_encoders = true: --memory cannot tell what their gradients take; plan without"
        )
    family = recognise(recipe.model.path, fp32_modules=recipe.model.fp32_modules)
    dtype, skeletons = DTYPES[recipe.model.dtype], Skeletons()
    parts = skeletons.load(family, recipe.model.path, parts=("transformer", "text", "autoencoder"), dtype=dtype)
    frozen = [m for n, m in parts.modules.items() if isinstance(m, nn.Module) and not n.startswith("transformer")]
    pairs, config = isinstance(recipe.algorithm, DpoOfflineConfig), recipe.trainer
    # A pair is two rows, whose activations wait for one backward.
    velocity = _velocity(recipe, family, parts, rows=config.tile_size * (2 if pairs else 1))
    module = parts.transformer
    prepare(module, skeletons, recipe, family)
    tiles = recipe.algorithm.batch_size // config.tile_size
    wide = config.precision.master == "float32"
    tile: TileBytes = trace_tile(
        velocity,
        [p for p in module.parameters() if p.requires_grad],
        skeletons=skeletons,
        fused=True,
        held=HeldGradient(config, tiles=tiles, grad_itemsize=4 if wide else dtype.itemsize),
        between=torch.no_grad()(velocity) if pairs else None,
    )
    sizes = Sizes.of(module, family.fsdp_blocks, () if dtype == torch.float32 else family.fp32_modules)
    lora = isinstance(recipe.model.finetune, s.LoraFinetune)
    copies = Copies(average=config.ema_decay is not None, frozen=pairs and not lora)
    items = trainer_items(sizes, tile, config, dtype=dtype, lora=lora, tiles=tiles, copies=copies)
    # Autocast keeps what it casts until the forward ends, and its backward keeps it longer.
    cast = sizes.trained * dtype.itemsize if wide and dtype != torch.float32 else 0
    return [
        Item(name="text encoders and autoencoder", bytes=stored_bytes(frozen)),
        *(item for item in items if item.name not in _OF_FSDP),
        *([Item(name="weights in model.dtype", bytes=cast, phase="tile")] if cast else []),
    ]


def _velocity(recipe: SftRecipe, family: Family, parts: Components, *, rows: int) -> Callable[[], Latents]:
    """Of the largest item and the longest caption that the recipe takes."""
    geometry = _largest(recipe, family.sampling_defaults(parts).geometry)
    length = recipe.model.max_sequence_length
    caption = " ".join(["a"] * length)
    encoded = family.encode_prompts(parts, [caption], max_sequence_length=length, geometry=geometry)
    one = Conditioning(positive=encoded, negative=None, geometry=geometry)
    x, sigmas, conditioning = inputs_of(family.latent_shapes(parts, geometry), rows=rows, conditioning=one)
    return functools.partial(
        family.velocity,
        parts.transformer,
        x,
        sigmas,
        conditioning,
        guidance_scale=1.0,
        dtype=DTYPES[recipe.model.dtype],
    )


def _largest(recipe: SftRecipe, default: Geometry) -> Geometry:
    sampling, data = recipe.sampling, recipe.data
    size, frames = (sampling.height, sampling.width), sampling.num_frames
    if isinstance(data, FilesData):
        size = max(data.buckets.all_sizes(size), key=lambda one: one[0] * one[1])
        frames = max((*data.buckets.frames, frames))
    return Geometry(height=size[0], width=size[1], num_frames=frames, fps=sampling.fps or default.fps)
