"""What a weight hand-off says about itself, and what both ends compare.

A manifest is plain JSON: it travels in the request that tells an engine to fetch the tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from verst.errors import SyncError

_ALIGNMENT = 64
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}


class TensorEntry(TypedDict):
    name: str
    dtype: str
    shape: list[int]
    offset: int
    """Bytes from the start of the bucket."""


class Bucket(TypedDict):
    handle: str
    nbytes: int
    tensors: list[TensorEntry]


class Manifest(TypedDict):
    version: int
    """Weight version that the engine holds afterwards."""
    finetune: dict[str, Any]
    """{"type": "full"} or {"type": "lora", "rank", "alpha", "targets"}."""
    buckets: list[Bucket]
    digest: str
    """`digest_of` all tensors as sent."""


class Certificate(TypedDict):
    version: int
    num_applied: int
    digest: str
    """`digest_of` the receiver's own parameters after they were written."""


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names (sorted), dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def pack(tensors: Mapping[str, Tensor], *, bucket_bytes: int) -> list[list[TensorEntry]]:
    """Tensors laid out in flat buckets of at most `bucket_bytes` (a larger tensor gets a bucket of its own)."""
    buckets: list[list[TensorEntry]] = []
    used = bucket_bytes
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        start = -(-used // _ALIGNMENT) * _ALIGNMENT
        if not buckets or start + nbytes > bucket_bytes:
            buckets.append([])
            start = 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        buckets[-1].append(TensorEntry(name=name, dtype=dtype, shape=list(tensor.shape), offset=start))
        used = start + nbytes
    return buckets


def bucket_size(entries: Sequence[TensorEntry]) -> int:
    last = entries[-1]
    return last["offset"] + _nbytes(last)


def view_in(block: Tensor, entry: TensorEntry) -> Tensor:
    """The entry's tensor inside its bucket's bytes, without a copy."""
    flat = block[entry["offset"] : entry["offset"] + _nbytes(entry)]
    return flat.view(_DTYPES[entry["dtype"]]).view(entry["shape"])


def _nbytes(entry: TensorEntry) -> int:
    return math.prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize


def verify(manifest: Manifest, certificate: Certificate, *, engine: str) -> None:
    """Raises SyncError unless the engine holds exactly what was sent."""
    sent = sum(len(bucket["tensors"]) for bucket in manifest["buckets"])
    pairs: list[tuple[Literal["version", "num_applied", "digest"], Any]] = [
        ("num_applied", sent),
        ("digest", manifest["digest"]),
        ("version", manifest["version"]),
    ]
    for key, expected in pairs:
        if certificate[key] != expected:
            raise SyncError(
                f"engine {engine} did not take the weights: {key} is {certificate[key]}, expected {expected}. "
                "It would go on sampling another model than the one that is trained."
            )
