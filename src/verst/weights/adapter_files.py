"""LoRA files of PEFT and diffusers: written beside a checkpoint, read as the start of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn

from verst.errors import ConfigError
from verst.weights.lora import ADAPTER, LoraSpec, adaptable, is_lora_parameter

_PEFT_PREFIX = "base_model.model"
_PREFIXES = (f"{_PEFT_PREFIX}.", "transformer.", "diffusion_model.")
"""What PEFT, diffusers and other trainers put before a transformer's names."""
_METADATA = "lora_adapter_metadata"
"""diffusers keeps rank and alpha under this key of the file's own metadata."""
_FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")


def write_adapters(folder: Path, module: nn.Module, tensors: Mapping[str, Tensor], spec: LoraSpec) -> list[Path]:
    """`adapter/` for the transformer and `adapter_2/` for a second expert, each in PEFT's layout; the folders.

    tensors: the module's LoRA parameters by name, whole. Load with `PeftModel.from_pretrained(transformer, folder)`, or
    `transformer.load_lora_adapter(folder, prefix="base_model.model", weight_name="adapter_model.safetensors")`.
    """
    folders = []
    for prefix, index, _ in _experts(module):
        out = folder / f"adapter{_suffix(index)}"
        out.mkdir(parents=True, exist_ok=True)
        config = LoraConfig(r=spec.rank, lora_alpha=int(spec.alpha), target_modules=list(spec.targets), bias="none")
        # PEFT declares an integer, and computes with whatever number it is.
        config.lora_alpha = spec.alpha  # type: ignore[assignment]
        config.save_pretrained(str(out))
        named = {
            f"{_PEFT_PREFIX}.{name.removeprefix(prefix)}".replace(f".{ADAPTER}.weight", ".weight"): value.contiguous()
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        facts = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": list(spec.targets)}
        metadata = {_METADATA: json.dumps({f"{_PEFT_PREFIX}.{key}": value for key, value in facts.items()})}
        save_file(named, out / _FILES[0], metadata={"format": "pt", **metadata})
        folders.append(out)
    return folders


def load_adapters(module: nn.Module, spec: LoraSpec, path: Path) -> int:
    """Start the attached LoRA of `module` from a file, or a folder with one for each expert; the tensors loaded.

    Raises ConfigError, naming them, for names that do not all match, another rank or another alpha.
    """
    count = 0
    for _, index, model in _experts(module):
        file = _find(path, index)
        held = {name: p for name, p in model.named_parameters() if is_lora_parameter(name)}
        tensors, alpha = _read(file)
        _check(file, tensors, held)
        if alpha is None:
            # What diffusers takes where a file does not say.
            alpha = float(spec.rank)
        if alpha != spec.alpha:
            raise ConfigError(
                f"model.finetune.alpha = {spec.alpha:g}, but {file} was trained with alpha = {alpha:g} at rank "
                f"{spec.rank}: set model.finetune.alpha = {alpha:g}"
            )
        with torch.no_grad():
            for name, p in held.items():
                p.copy_(tensors[name])
        count += len(held)
    return count


def _check(file: Path, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    unknown, missing = sorted(set(tensors) - set(held)), sorted(set(held) - set(tensors))
    if unknown or missing or not held:
        parts = [f"model.finetune.init: {len(set(tensors) & set(held))} of {len(held)} LoRA tensors are in {file}"]
        parts += [f"the file's own: {', '.join(unknown[:3])} ({len(unknown)})"] if unknown else []
        parts += [f"not in it: {', '.join(missing[:3])} ({len(missing)})"] if missing else []
        raise ConfigError(f"{'; '.join(parts)}. Set model.finetune.targets to the layers that it was trained on")
    for name, value in tensors.items():
        if value.shape != held[name].shape:
            raise ConfigError(
                f"model.finetune.init: {name} is {list(value.shape)} in {file} and {list(held[name].shape)} here: set "
                "model.finetune.rank to the file's"
            )
        if not value.isfinite().all():
            raise ConfigError(f"model.finetune.init: {name} in {file} is not finite")


def _read(file: Path) -> tuple[dict[str, Tensor], float | None]:
    """Tensors by the names that `attach_lora` gives, and alpha where the file or the config beside it says it."""
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata() or {}
        config_file = file.with_name("adapter_config.json")
        config = json.loads(config_file.read_text()) if config_file.exists() else {}
        facts = json.loads(metadata.get(_METADATA, "{}"))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"model.finetune.init: {file} cannot be read: {error}") from error
    alphas = [value for key, value in facts.items() if key.rsplit(".", 1)[-1] == "lora_alpha"]
    alpha: Any = config.get("lora_alpha", alphas[0] if alphas else None)
    return {_own_name(name): value for name, value in found.items()}, None if alpha is None else float(alpha)


def _own_name(name: str) -> str:
    name = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
    for side, other in (("lora_A", "lora.down"), ("lora_B", "lora.up")):
        for spelling in (side, other):
            if name.endswith(f".{spelling}.weight"):
                return f"{name.removesuffix(f'.{spelling}.weight')}.{side}.{ADAPTER}.weight"
    return name


def _find(path: Path, index: int) -> Path:
    """The file of one expert: as `verst export` names it, as a checkpoint does, or the one that `path` is."""
    if path.is_file() and index == 0:
        return path
    suffix = _suffix(index)
    tried = [path / f"adapter{suffix}" / _FILES[0], path / f"pytorch_lora_weights{suffix}.safetensors"]
    tried += [path / name for name in _FILES] if index == 0 else []
    for candidate in tried:
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"model.finetune.init = {str(path)!r} holds no LoRA{f' of expert {index + 1}' if index else ''}; looked for "
        f"{', '.join(str(candidate) for candidate in tried)}"
    )


def _suffix(index: int) -> str:
    return f"_{index + 1}" if index else ""


def _experts(module: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """(prefix of its names in `module`, number, the diffusers model)."""
    names = list(module.keys()) if isinstance(module, nn.ModuleDict) else [None]
    for index, (name, model) in enumerate(zip(names, adaptable(module), strict=True)):
        yield ("" if name is None else f"{name}."), index, model
