"""Tensors on disk, keyed by a hash of everything they follow from: nothing is ever stale, only unused.

An entry is one safetensors file with the checksum of its tensors; it appears whole, by one rename.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]


class TensorCache:
    """`folder/ab/abcd....safetensors`. Several runs may share a folder: an entry says the same whoever wrote it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_hits = 0
        self.num_misses = 0
        self.num_damaged = 0
        """Entries that were not what was written; they are made again."""
        self.num_bytes = sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
        """On disk; those that other processes write meanwhile are not counted."""

    def get(self, key: Mapping[str, Any], make: Callable[[], Tensors]) -> Tensors:
        """The tensors of `key`, read or made. Returned on the CPU, with the same bits either way."""
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        path = self._folder / name[:2] / f"{name}.safetensors"
        found = self._read(path)
        if found is not None:
            self.num_hits += 1
            return found
        self.num_misses += 1
        made = {label: tensor.detach().cpu().contiguous() for label, tensor in make().items()}
        self._write(path, made)
        return made

    def _read(self, path: Path) -> Tensors | None:
        """None where there is no entry, or a damaged one."""
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                wanted = (file.metadata() or {}).get("sha256")
        except (SafetensorError, OSError):
            wanted, tensors = None, {}
        if wanted == _checksum(tensors):
            return tensors
        self.num_damaged += 1
        self.num_bytes -= path.stat().st_size
        return None

    def _write(self, path: Path, tensors: Tensors) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.stem}.{os.getpid()}.partial")
        save_file(tensors, partial, metadata={"sha256": _checksum(tensors)})
        self.num_bytes += partial.stat().st_size
        partial.replace(path)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def folder_fingerprint(folders: Mapping[str, Path]) -> str:
    """SHA-256 over the names and bytes of all files in folders, by label."""
    digest = hashlib.sha256()
    for label in sorted(folders):
        root = folders[label]
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            digest.update(f"{label}/{path.relative_to(root).as_posix()}".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
