"""A trained model as a folder that plain diffusers loads."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from verst.families import Components
from verst.weights.lora import lora_spec_of


def save_pipeline(components: Components, folder: Path, *, dtype: torch.dtype) -> Path:
    """Write all components as a diffusers pipeline; `folder` appears whole, by one rename, or not at all.

    Transformer and autoencoder are rounded to `dtype`, LoRA is merged. Text encoders stay as they are: transformers
    loads weights in the dtype they were saved in, diffusers in fp32, and plain `from_pretrained` would mix the two.
    """
    index = json.loads((components.folder / "model_index.json").read_text())
    modules: dict[str, Any] = dict(components.modules)
    for name in ("transformer", "vae"):
        modules[name] = _frozen_copy(modules[name], dtype)
    partial = folder.with_name(f".partial_{folder.name}")
    if partial.exists():
        shutil.rmtree(partial)
    getattr(diffusers, index["_class_name"])(**modules).save_pretrained(partial)
    for path in partial.glob("*/config.json"):
        _forget_origin(path)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return folder


def _forget_origin(path: Path) -> None:
    """diffusers writes down where a module was loaded from: a path of this machine, of no use on another."""
    config = json.loads(path.read_text())
    if config.pop("_name_or_path", None) is not None:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _frozen_copy(module: nn.Module, dtype: torch.dtype) -> Any:
    clone: Any = copy.deepcopy(module)
    if lora_spec_of(clone) is not None:
        clone.fuse_lora()
        clone.unload_lora()
    # Not `clone.to(dtype)`: diffusers warns there about modules that must stay fp32, and these have none.
    for parameter in clone.parameters():
        parameter.data = parameter.data.to(dtype)
    return clone.requires_grad_(False)
