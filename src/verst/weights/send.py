"""The sending end: the trained tensors, copied once into shared memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verst.errors import SyncError
from verst.weights.block import SharedBlock
from verst.weights.lora import LoraSpec
from verst.weights.manifest import Bucket, Manifest, bucket_size, digest_of, pack, view_in


def trained_tensors(named: Mapping[str, Tensor], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Unsharded on the CPU in the engine's dtype, the parameter's own memory where it is that already.

    A collective: every rank calls it.
    """
    tensors = {}
    for name, p in named.items():
        value = p.detach()
        full = value.full_tensor() if isinstance(value, DTensor) else value
        tensors[name] = full.to(device="cpu", dtype=dtype)
    return tensors


class Publication:
    """One version of the weights in shared memory, until `close`."""

    def __init__(
        self, tensors: Mapping[str, Tensor], *, version: int, lora: LoraSpec | None, bucket_bytes: int
    ) -> None:
        """Raises SyncError, naming it, for a tensor that is not finite."""
        broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if broken:
            raise SyncError(f"weights of version {version} are not finite: {', '.join(broken[:5])}")
        self._blocks: list[SharedBlock] = []
        buckets = []
        for entries in pack(tensors, bucket_bytes=bucket_bytes):
            block = SharedBlock(bucket_size(entries))
            self._blocks.append(block)
            assert block.bytes is not None
            for entry in entries:
                view_in(block.bytes, entry).copy_(tensors[entry["name"]])
            buckets.append(Bucket(handle=block.handle, nbytes=block.nbytes, tensors=entries))
        finetune = {"type": "full"} if lora is None else {"type": "lora", **lora.to_dict()}
        self.manifest = Manifest(version=version, finetune=finetune, buckets=buckets, digest=digest_of(tensors))

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def close(self) -> None:
        for block in self._blocks:
            block.close()
        self._blocks = []
