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
from verst.families.loading import index_file, index_of
from verst.weights.lora import lora_spec_of

_ROUNDED = ("transformer", "transformer_2", "vae")


def save_pipeline(components: Components, folder: Path, *, dtype: torch.dtype) -> Path:
    """Write all components as a diffusers pipeline; `folder` appears whole, by one rename, or not at all.

    Transformer and autoencoder are rounded to `dtype`, LoRA is merged. Text encoders stay as they are: transformers
    loads weights in the dtype they were saved in, diffusers in fp32, and plain `from_pretrained` would mix the two.
    """
    partial = folder.with_name(f".partial_{folder.name}")
    if partial.exists():
        shutil.rmtree(partial)
    rounded = {name: _frozen_copy(components.modules[name], dtype) for name in _ROUNDED if components.modules.get(name)}
    if index_file(components.folder).name == "model_index.json":
        class_name = index_of(components)["_class_name"]
        getattr(diffusers, class_name)(**{**components.modules, **rounded}).save_pretrained(partial)
    else:
        # A modular pipeline is not built from its parts alone: what was not trained is copied.
        shutil.copytree(components.folder, partial, ignore=shutil.ignore_patterns(*rounded))
        for name, module in rounded.items():
            module.save_pretrained(partial / name)
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
    # A half-precision base would round a merged update away.
    clone: Any = copy.deepcopy(module).float()
    if lora_spec_of(clone) is not None:
        clone.fuse_lora()
        clone.unload_lora()
    # Not `clone.to(dtype)`: diffusers warns there about modules that must stay fp32, and these have none.
    for parameter in clone.parameters():
        parameter.data = parameter.data.to(dtype)
    return clone.requires_grad_(False)
