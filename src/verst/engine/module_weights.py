"""A module's tensors by name: read from a folder, checked, copied, hashed. Hashes are SGLang-Diffusion's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from verst.errors import SyncError
from verst.weights.lora import lora_spec_of


def read_folder(folder: Path, module: str) -> dict[str, Tensor]:
    """All tensors of `<folder>/<module>/*.safetensors`, on the CPU. Raises SyncError."""
    files = sorted((folder / module).glob("*.safetensors"))
    if not files:
        raise SyncError(f"{folder / module} holds no *.safetensors file. Nothing was changed.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, safetensors.SafetensorError) as error:
            raise SyncError(f"{file} cannot be read: {error}. Nothing was changed.") from error
    return tensors


def plan_copies(
    module: nn.Module, tensors: Mapping[str, Tensor], *, where: str, complete: bool
) -> list[tuple[Tensor, Tensor]]:
    """(the module's tensor, its new value) for each of `tensors`, all checked; `complete`: none may be left out.

    Raises SyncError for unknown or missing names, another shape, a value that is not finite, or a module with a LoRA
    (which would go on changing what the new weights compute).
    """
    if lora_spec_of(module) is not None:
        raise SyncError(f"{where} holds a LoRA: send it through /update_weights_from_manifest, or restart the engine")
    own = module.state_dict()
    unknown = sorted(set(tensors) - set(own))
    if unknown or not tensors:
        raise SyncError(
            f"{where} has no tensors {_few(unknown)}; its own are called like {_few(sorted(own))}. Nothing was changed."
        )
    # Tied parameters have two names and are stored under one.
    written = {own[name].data_ptr() for name in tensors}
    missing = sorted(name for name, tensor in own.items() if tensor.data_ptr() not in written)
    if complete and missing:
        raise SyncError(
            f"{where}: {len(missing)} of {len(own)} tensors are missing: {_few(missing)}. Nothing was changed."
        )
    for name, value in tensors.items():
        if value.shape != own[name].shape:
            raise SyncError(
                f"{where}.{name} is {list(own[name].shape)}, what was sent is {list(value.shape)}. Nothing was changed."
            )
        if not value.isfinite().all():
            raise SyncError(f"{where}.{name} as sent is not finite. Nothing was changed.")
    return [(own[name], value) for name, value in tensors.items()]


def checksum(module: nn.Module) -> str:
    """SHA-256 over all tensors by name: name, then bytes."""
    sha = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        sha.update(name.encode())
        sha.update(_bytes(tensor))
    return sha.hexdigest()


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 over dtype, shape and bytes."""
    sha = hashlib.sha256(str(tensor.dtype).encode())
    sha.update(repr(tuple(tensor.shape)).encode())
    sha.update(_bytes(tensor))
    return sha.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
