"""What a weight hand-off says about itself, and what both ends compare.

A manifest is plain JSON: it travels in the request that tells an engine to fetch the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from verst.errors import SyncError

ALIGNMENT = 64
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
_OTHERS = (torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)
"""Of buffers."""
_DTYPES = {str(d).removeprefix("torch."): d for d in (*_FLOATS, *_OTHERS)}


class TensorEntry(TypedDict):
    name: str
    dtype: str
    shape: list[int]
    offset: int
    """Bytes from the start of the bucket."""


class Bucket(TypedDict):
    handle: str
    """Where the transport keeps it: a shared block, a file, an offset; empty where it only passes by."""
    nbytes: int
    tensors: list[TensorEntry]


class Manifest(TypedDict):
    version: int
    """Weight version that the engine holds afterwards."""
    finetune: dict[str, Any]
    """{"type": "full"} or {"type": "lora", "form": "pairs" or "merged", "rank", "alpha", "targets"}."""
    transport: str
    """Key of `verst.weights.transports.RECEIVERS`."""
    endpoint: dict[str, Any]
    """What that transport needs besides the buckets; plain JSON."""
    buckets: list[Bucket]
    digest: str
    """`digest_of` all tensors as sent; empty where it travels with them."""


class Certificate(TypedDict):
    version: int
    num_applied: int
    digest: str
    """`digest_of` the receiver's own parameters after they were written."""


def pack(
    shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype], *, bucket_bytes: int
) -> list[list[TensorEntry]]:
    """Tensors laid out in flat buckets of at most `bucket_bytes` (a larger tensor gets a bucket of its own)."""
    buckets: list[list[TensorEntry]] = []
    used = bucket_bytes
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * dtypes[name].itemsize
        start = aligned(used)
        if not buckets or start + nbytes > bucket_bytes:
            buckets.append([])
            start = 0
        dtype = str(dtypes[name]).removeprefix("torch.")
        buckets[-1].append(TensorEntry(name=name, dtype=dtype, shape=list(shape), offset=start))
        used = start + nbytes
    return buckets


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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
    """Raises SyncError unless the engine holds exactly what was sent (as far as the manifest knows its digest)."""
    sent = sum(len(bucket["tensors"]) for bucket in manifest["buckets"])
    pairs: list[tuple[Literal["version", "num_applied", "digest"], Any]] = [
        ("num_applied", sent),
        ("version", manifest["version"]),
    ]
    if manifest["digest"]:
        pairs.append(("digest", manifest["digest"]))
    for key, expected in pairs:
        if certificate[key] != expected:
            raise SyncError(
                f"engine {engine} did not take the weights: {key} is {certificate[key]}, expected {expected}. "
                "It would go on sampling another model than the one that is trained."
            )
