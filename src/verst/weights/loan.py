"""Frozen weights that two processes of one device hold once: the trainer lends its own, an engine computes with them.

    trainer: Lender(module)   frozen tensors move into shared blocks, bucket by bucket; the module goes on in them
             loan             plain JSON: where the blocks are, what lies in them, and their digest
    engine:  Borrower(loan)   maps the blocks and puts their tensors into a module that was built without memory

On a CPU a block is a memfd, on a GPU an allocation behind a CUDA IPC handle; nothing else differs. Borrowed memory is
only read: on a CPU it is mapped read-only, so that a stray write ends the engine and not the weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from verst.errors import EngineError, SyncError
from verst.weights import gpu_memory
from verst.weights.block import SharedBlock, map_block
from verst.weights.digest import digest_of
from verst.weights.fill import copy_all
from verst.weights.lora import is_lora_parameter
from verst.weights.manifest import TensorEntry, aligned, bucket_size, pack, view_in

_BUCKET_BYTES = 256 * 2**20


class LentBucket(TypedDict):
    handle: dict[str, Any]
    """{"block": path} on a CPU; `gpu_memory.share` on a GPU."""
    nbytes: int
    tensors: list[TensorEntry]


class Loan(TypedDict):
    device: str
    """cpu or cuda."""
    lifeline: str
    """A block that is gone as soon as the lender is."""
    buckets: list[LentBucket]
    digest: str
    """`digest_of` the buckets' bytes."""


class Lender:
    """Moves the frozen parameters and the buffers of `module` into memory that others can map."""

    def __init__(self, module: nn.Module, *, device: torch.device, bucket_bytes: int = _BUCKET_BYTES) -> None:
        """Needs memory for one bucket more than the module has. The module must not be moved or cast afterwards."""
        frozen = dict(_frozen(module))
        assert not any(tensor.requires_grad for tensor in frozen.values()), "what is trained cannot be lent"
        dtypes = {name: tensor.dtype for name, tensor in frozen.items()}
        self._lifeline = SharedBlock(1)
        self._blocks: list[SharedBlock] = []
        self._memory: list[Tensor] = []
        buckets = []
        for entries in pack({n: t.shape for n, t in frozen.items()}, dtypes, bucket_bytes=bucket_bytes):
            nbytes = aligned(bucket_size(entries))
            memory, handle = self._allocate(nbytes, device)
            places = [view_in(memory, entry) for entry in entries]
            tensors = [frozen[entry["name"]] for entry in entries]
            copy_all(places, [tensor.detach() for tensor in tensors])
            for tensor, place in zip(tensors, places, strict=True):
                tensor.data = place
            self._memory.append(memory)
            buckets.append(LentBucket(handle=handle, nbytes=nbytes, tensors=entries))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        self.loan = Loan(
            device=device.type,
            lifeline=self._lifeline.handle,
            buckets=buckets,
            digest=digest_of(_numbered(self._memory)),
        )

    def _allocate(self, nbytes: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        if device.type == "cuda":
            # Zeros: what lies between the tensors counts in the digest.
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            return memory, gpu_memory.share(memory)
        block = SharedBlock(nbytes)
        self._blocks.append(block)
        assert block.bytes is not None
        return block.bytes, {"block": block.handle}

    def close(self) -> None:
        """Lend no more: borrowers notice at their next batch. The module keeps its weights."""
        self._lifeline.close()
        for block in self._blocks:
            block.leave()
        self._blocks, self._memory = [], []


class Borrower:
    """The lender's memory in this process."""

    def __init__(self, loan: Loan, *, device: torch.device) -> None:
        """Raises SyncError where the memory cannot be mapped, or holds something else than was lent."""
        if loan["device"] != device.type:
            raise SyncError(
                f"weights lent on {loan['device']} cannot be used on {device}: lender and engine share a device"
            )
        self._lifeline = loan["lifeline"]
        map_block(self._lifeline, 1)
        self._inode = _inode(self._lifeline)
        self._buckets = loan["buckets"]
        self._memory = [_map(bucket, device) for bucket in self._buckets]
        held = digest_of(_numbered(self._memory))
        if held != loan["digest"]:
            raise SyncError(f"digest of the borrowed weights is {held}, lent were {loan['digest']}")

    @property
    def num_bytes(self) -> int:
        """Mapped, and held by the lender."""
        return sum(bucket["nbytes"] for bucket in self._buckets)

    def place(self, module: nn.Module) -> None:
        """Put the borrowed tensors where `module`, built without memory, has its parameters and buffers.

        Raises SyncError when names or shapes differ: lender and engine were not made from one checkpoint.
        """
        lent = {
            entry["name"]: view_in(memory, entry)
            for memory, bucket in zip(self._memory, self._buckets, strict=True)
            for entry in bucket["tensors"]
        }
        own = dict(_frozen(module))
        if own.keys() != lent.keys():
            raise SyncError(
                f"the lender's weights are not this model's: lent and unknown here {sorted(lent.keys() - own.keys())[:3]}, "
                f"not lent {sorted(own.keys() - lent.keys())[:3]}"
            )
        wrong = [name for name, tensor in own.items() if tensor.shape != lent[name].shape]
        if wrong:
            raise SyncError(
                f"{wrong[0]} was lent as {list(lent[wrong[0]].shape)}, here it is {list(own[wrong[0]].shape)}"
            )
        _replace(module, {id(own[name]): tensor for name, tensor in lent.items()})

    def check(self) -> None:
        """Raises EngineError when the lender has ended: its memory may be anybody's by now."""
        if _inode(self._lifeline) != self._inode:
            raise EngineError(
                "the trainer whose frozen weights this engine computes with has ended or taken them back; restart the engine"
            )


def _frozen(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name without PEFT's wrappers -> each frozen parameter and each buffer, tied ones once."""
    for name, parameter in module.named_parameters():
        if not is_lora_parameter(name):
            yield name.replace(".base_layer.", "."), parameter
    for name, buffer in module.named_buffers():
        yield name.replace(".base_layer.", "."), buffer


def _replace(module: nn.Module, by_id: Mapping[int, Tensor]) -> None:
    parameters = {key: nn.Parameter(tensor, requires_grad=False) for key, tensor in by_id.items()}
    for owner in module.modules():
        for leaf, old in owner._parameters.items():
            if old is not None:
                owner._parameters[leaf] = parameters[id(old)]
        for leaf, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[leaf] = by_id[id(buffer)]


def _numbered(memory: list[Tensor]) -> dict[str, Tensor]:
    return {str(index): tensor for index, tensor in enumerate(memory)}


def _map(bucket: LentBucket, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return gpu_memory.open_shared(bucket["handle"], device)[: bucket["nbytes"]]
    return map_block(bucket["handle"]["block"], bucket["nbytes"])


def _inode(handle: str) -> tuple[int, int] | None:
    # A process that has the dead lender's number and a file of that number is another one all the same.
    try:
        found = os.stat(handle)
    except OSError:
        return None
    return found.st_dev, found.st_ino
