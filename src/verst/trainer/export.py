"""What a run has learned, as modules and as folders that plain diffusers loads."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import diffusers
import torch
from diffusers.training_utils import _collate_lora_metadata
from peft import get_peft_model_state_dict
from torch import nn

from verst.config import sections as s
from verst.config.recipe import RlRecipe
from verst.errors import ConfigError
from verst.families import recognise
from verst.obs.waiting import Tell, nobody
from verst.trainer import checkpoint
from verst.trainer.rl import lora_spec
from verst.weights.lora import ADAPTER, adaptable, attach_lora

What = Literal["auto", "lora", "pipeline"]


@dataclass(frozen=True, kw_only=True)
class Exported:
    folder: Path
    what: Literal["lora", "pipeline"]
    checkpoint: Path
    """Whose weights they are."""


def find_checkpoint(run: Path, which: str = "newest") -> Path:
    """A published checkpoint: the "newest", the "best", or that of an iteration, e.g. "40".

    Raises ConfigError, naming those that there are.
    """
    root = run / "checkpoints"
    folders = checkpoint.published(root)
    have = ", ".join(str(checkpoint.iteration_of(f)) for f in folders) or "none"
    if which == "best" and checkpoint.best_folder(root) is None:
        raise ConfigError(f"{run} keeps no best checkpoint (checkpoint.keep_best); iterations saved: {have}")
    if which not in ("best", "newest") and not which.isdecimal():
        raise ConfigError(f"checkpoint {which!r} must be newest, best or an iteration; iterations saved: {have}")
    if which == "newest":
        wanted = folders[-1] if folders else None
    else:
        wanted = checkpoint.best_folder(root) if which == "best" else checkpoint.step_folder(root, int(which))
    if wanted is None or wanted not in folders:
        name = "" if wanted is None else f" of iteration {checkpoint.iteration_of(wanted)}"
        raise ConfigError(f"{run} has no checkpoint{name}; iterations saved: {have}")
    return wanted


def load_trained(module: nn.Module, recipe: RlRecipe, folder: Path, *, ema: bool) -> None:
    """Put the trained weights of a checkpoint into a transformer of the recipe's model, LoRA unmerged.

    Raises CheckpointError for a damaged checkpoint, ConfigError when it holds no moving average.
    """
    checkpoint.read_state(folder)
    if ema and recipe.trainer.ema_decay is None:
        raise ConfigError("this run keeps no moving average (trainer.ema_decay is unset)")
    spec = lora_spec(recipe, recognise(recipe.model.path).lora_targets)
    if spec is None:
        named = dict(module.named_parameters())
    else:
        attach_lora(module, spec)
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    prefix = "ema" if ema else "model"
    loaded = {f"{prefix}.transformer.{name}": torch.zeros(p.shape) for name, p in named.items()}
    checkpoint.read_tensors(folder, loaded, alone=True)
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(loaded[f"{prefix}.transformer.{name}"])
    module.requires_grad_(False)


def export(
    run: Path, recipe: RlRecipe, out: Path, *, what: What, which: str, ema: bool, tell: Tell = nobody
) -> Exported:
    """Write `out` whole or not at all.

    lora: `pytorch_lora_weights.safetensors`, for `pipeline.load_lora_weights(out)`.
    pipeline: a model folder for `DiffusionPipeline.from_pretrained(out)`, a LoRA merged into it in fp32.
    auto: lora where one was trained. which: the checkpoint, as for `find_checkpoint`.
    Raises ConfigError where `out` exists, or there is no such checkpoint, LoRA or moving average.
    """
    if what not in get_args(What):
        raise ConfigError(f"what = {what!r}: valid: {', '.join(get_args(What))}")
    is_lora = isinstance(recipe.model.finetune, s.LoraFinetune)
    if what == "lora" and not is_lora:
        raise ConfigError(f"{run} trained the whole transformer, so there is no LoRA; use --what pipeline")
    if out.exists():
        raise ConfigError(f"{out} exists already; name a folder that does not")
    folder = find_checkpoint(run, which)
    family = recognise(recipe.model.path)
    tell(f"loading {recipe.model.path}")
    components = family.load(recipe.model.path, parts=("transformer",), dtype=torch.float32, device=torch.device("cpu"))
    tell(f"loading {folder}")
    load_trained(components.transformer, recipe, folder, ema=ema)
    made: Literal["lora", "pipeline"] = "lora" if is_lora and what != "pipeline" else "pipeline"
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    tell(f"writing {out}")
    try:
        if made == "lora":
            write_lora(components.transformer, recipe.model.path, partial)
        else:
            _write_pipeline(components.transformer, recipe.model.path, partial, merge=is_lora)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(folder=out, what=made, checkpoint=folder)


def write_lora(module: nn.Module, model: Path, out: Path) -> list[Path]:
    """The attached LoRA in diffusers' own format; the files, one for each expert of the model.

    Load with `pipeline.load_lora_weights(out)`; a second expert (Wan 2.2 A14B) with `weight_name =
    "pytorch_lora_weights_2.safetensors", load_into_transformer_2 = True`; a pipeline without LoRA loading (Cosmos3,
    HunyuanVideo-1.5) by `pipeline.transformer.load_lora_adapter(out, prefix=None, weight_name = ...)`.
    """
    pipeline: Any = getattr(diffusers, _pipeline_name(model), None)
    files = []
    for index, transformer in enumerate(adaptable(module)):
        name = f"pytorch_lora_weights{f'_{index + 1}' if index else ''}.safetensors"
        if hasattr(pipeline, "save_lora_weights"):
            pipeline.save_lora_weights(
                out,
                transformer_lora_layers=get_peft_model_state_dict(transformer, adapter_name=ADAPTER),
                weight_name=name,
                **_collate_lora_metadata({"transformer": transformer}),
            )
        else:
            transformer.save_lora_adapter(out, adapter_name=ADAPTER, weight_name=name)
        files.append(out / name)
    return files


def _pipeline_name(model: Path) -> str:
    for index in ("model_index.json", "modular_model_index.json"):
        if (model / index).exists():
            return str(json.loads((model / index).read_text())["_class_name"])
    raise ConfigError(f"{model} has no model_index.json")


def _write_pipeline(module: nn.Module, model: Path, out: Path, *, merge: bool) -> None:
    parts = dict(zip(("transformer", "transformer_2"), adaptable(module), strict=False))
    shutil.copytree(model, out, ignore=lambda folder, names: list(parts) if Path(folder) == model else [])
    for name, transformer in parts.items():
        if merge:
            transformer.fuse_lora()
            transformer.unload_lora()
        transformer.save_pretrained(out / name)
