"""The model of a supervised run: what is loaded in which dtype, what is trained, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from verst.config.sections import LoraFinetune
from verst.config.supervised import SftRecipe
from verst.errors import ConfigError
from verst.families import ALL_PARTS, Components, recognise
from verst.families.compiled import compile_blocks
from verst.families.tiny import build_glyphs
from verst.loops.forward import keep_islands_in_fp32
from verst.trainer.recompute import recompute_blocks
from verst.trainer.rl import DTYPES
from verst.weights.adapter_files import load_adapters
from verst.weights.lora import LoraSpec, adaptable, attach_lora

TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def pick_device(recipe: SftRecipe) -> torch.device:
    there = torch.cuda.is_available()
    if recipe.run.device == "cuda" and not there:
        raise ConfigError('run.device = "cuda", but torch sees no CUDA device; use "auto" or "cpu"')
    return torch.device("cuda" if there and recipe.run.device != "cpu" else "cpu")


def load_model(recipe: SftRecipe, device: torch.device) -> Components:
    """All parts, in model.dtype; what will be trained as `trainer.precision.master` says. Raises ConfigError or ModelError."""
    path = recipe.model.path
    if recipe.init == "glyphs" and not path.exists():
        build_glyphs(path, seed=recipe.run.seed)
    family = recognise(path, fp32_modules=recipe.model.fp32_modules)
    absent = sorted(set(recipe.algorithm.stream_weights) - set(family.streams))
    if absent:
        raise ConfigError(
            f"algorithm.stream_weights names {', '.join(absent)}; {family.name} has the streams {', '.join(family.streams)}"
        )
    dtype = DTYPES[recipe.model.dtype]
    components = family.load(path, parts=ALL_PARTS, dtype=dtype, device=device)
    full = not isinstance(recipe.model.finetune, LoraFinetune)
    if dtype != torch.float32 and full and recipe.trainer.precision.master == "float32":
        # Read again, not cast: what bf16 rounded away would be lost to the masters.
        masters = family.load(path, parts=("transformer",), dtype=torch.float32, device=device)
        components.modules.update(masters.modules)
    return components


def trained_modules(components: Components, recipe: SftRecipe) -> Mapping[str, nn.Module]:
    """The modules whose parameters are trained, and no others, now ask for gradients."""
    transformer, finetune = components.transformer, recipe.model.finetune
    if isinstance(finetune, LoraFinetune):
        targets = finetune.targets or components.family.lora_targets
        spec = LoraSpec(rank=finetune.rank, alpha=finetune.alpha, targets=targets)
        attach_lora(transformer, spec)
        for parameter in transformer.parameters():
            if parameter.requires_grad and recipe.trainer.precision.master == "float32":
                parameter.data = parameter.data.float()
        if finetune.init is not None:
            load_adapters(transformer, spec, finetune.init)
    else:
        transformer.requires_grad_(True)
    if recipe.model.dtype != "float32":
        keep_islands_in_fp32(transformer, components)
    trained: dict[str, nn.Module] = {"transformer": transformer}
    if recipe.trainer.train_text_encoders:
        for name in TEXT_ENCODERS:
            encoder: Any = components.modules.get(name)
            if encoder is not None:
                trained[name] = encoder.requires_grad_(True)
    return trained


def arrange_blocks(components: Components, recipe: SftRecipe) -> None:
    """What model.compile and trainer.activation_checkpointing ask for."""
    for model in adaptable(components.transformer):
        compile_blocks(model, components.family.fsdp_blocks, backend=recipe.model.compile)
    every = recipe.trainer.recompute_every
    if every is not None:
        for model in adaptable(components.transformer):
            recompute_blocks(model, components.family.fsdp_blocks, every=every)
