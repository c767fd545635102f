"""A model of shapes as a run makes its own ready for training, and the bytes of what it only reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from verst.config.recipe import Recipe
from verst.families import Family
from verst.families.skeleton import Skeletons
from verst.trainer.recompute import recompute_blocks
from verst.trainer.rl import DTYPES, lora_spec
from verst.weights.lora import adaptable, attach_lora


def prepare(module: nn.Module, skeletons: Skeletons, recipe: Recipe, family: Family) -> None:
    """What is trained asks for gradients, and blocks are computed again where the recipe says so."""
    spec = lora_spec(recipe, family.lora_targets)
    if spec is None:
        module.requires_grad_(True)
    else:
        with torch.device("meta"):
            attach_lora(module, spec)
        skeletons.fill(module, dtype=DTYPES[recipe.model.dtype])
    every = recipe.trainer.recompute_every
    if every is not None:
        for model in adaptable(module):
            recompute_blocks(model, family.fsdp_blocks, every=every)


def stored_bytes(modules: Sequence[nn.Module]) -> int:
    return sum(x.numel() * x.element_size() for m in modules for x in [*m.parameters(), *m.buffers()])
