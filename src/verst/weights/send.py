"""What goes out: the trained tensors, unsharded bucket by bucket, and rounded to what the engine holds."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from verst.errors import SyncError
from verst.weights.fill import are_finite, copy_all
from verst.weights.lora import LoraSpec
from verst.weights.manifest import TensorEntry, pack, view_in

LoraForm = Literal["pairs", "merged"]


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One version of the weights on one trainer rank."""

    version: int
    tensors: Mapping[str, Tensor]
    """Whole, or this rank's shards (DTensor), in any dtype and on any device."""
    dtypes: Mapping[str, torch.dtype]
    """What each is rounded to on its way."""
    lora: LoraSpec | None
    form: LoraForm = "pairs"
    """merged: the engine adds the pairs to its base weights."""

    @property
    def finetune(self) -> dict[str, Any]:
        """As the manifest says it."""
        return {"type": "full"} if self.lora is None else {"type": "lora", "form": self.form, **self.lora.to_dict()}

    def layout(self, bucket_bytes: int) -> list[list[TensorEntry]]:
        """The entries of each bucket; the same lists for the same names, shapes and dtypes, so not to be changed."""
        return _layout(tuple((name, t.shape, self.dtypes[name]) for name, t in self.tensors.items()), bucket_bytes)

    def sources(self, entries: Sequence[TensorEntry]) -> list[Tensor]:
        """The entries' tensors whole, on their device, not all of them rounded. A collective."""
        return gather([self.tensors[e["name"]] for e in entries], [self.dtypes[e["name"]] for e in entries])

    def fill(self, block: Tensor | None, entries: Sequence[TensorEntry]) -> list[Tensor]:
        """The entries' tensors into their places in `block`, a bucket's bytes; the places. A collective.

        None: this rank only helps to gather.
        """
        sources = self.sources(entries)
        if block is None:
            return []
        views = [view_in(block, entry) for entry in entries]
        copy_all(views, sources)
        return views

    def check_finite(self, tensors: Sequence[Tensor], entries: Sequence[TensorEntry]) -> None:
        """Of whole tensors, rounded. Raises SyncError that names those that are not."""
        self.refuse([e["name"] for e, good in zip(entries, are_finite(tensors), strict=True) if not good])

    def check_shards(self) -> None:
        """Of this rank's own shards, before anything is sent; what rounding would make infinite counts as well."""
        local = [t.to_local() if isinstance(t, DTensor) else t for t in self.tensors.values()]
        limits = [torch.finfo(self.dtypes[name]).max for name in self.tensors]
        good = are_finite([t.detach() for t in local], limits)
        self.refuse([name for name, fine in zip(self.tensors, good, strict=True) if not fine])

    def refuse(self, broken: Sequence[str]) -> None:
        """Raises SyncError that names tensors which are not finite, if there are any."""
        if broken:
            raise SyncError(f"weights of version {self.version} are not finite: {', '.join(broken[:5])}")


@functools.lru_cache(maxsize=8)
def _layout(tensors: tuple[tuple[str, torch.Size, torch.dtype], ...], bucket_bytes: int) -> list[list[TensorEntry]]:
    shapes, dtypes = {name: shape for name, shape, _ in tensors}, {name: dtype for name, _, dtype in tensors}
    return pack(shapes, dtypes, bucket_bytes=bucket_bytes)


def trained_tensors(named: Mapping[str, Tensor], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Unsharded on the CPU in the engine's dtype, the parameter's own memory where it is that already.

    A collective: every rank calls it.
    """
    return {name: _whole(p.detach()).to(device="cpu", dtype=dtype) for name, p in named.items()}


def gather(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The tensors whole, on their device; those that had to be gathered are rounded first.

    FSDP's shards (dim 0 over one mesh) travel flat, one collective for all of a dtype; other placements one by one.
    """
    out: list[Tensor | None] = [None] * len(tensors)
    flat: dict[torch.dtype, dict[int, DTensor]] = {}
    for index, tensor in enumerate(tensors):
        value: Any = on_mesh(tensor.detach())
        if not isinstance(value, DTensor) or value.device_mesh.size() == 1:
            out[index] = value.to_local() if isinstance(value, DTensor) else value
        elif value.device_mesh.ndim == 1 and value.placements == (Shard(0),):
            flat.setdefault(dtypes[index], {})[index] = value
        else:
            rounded: Any = value.to(dtypes[index])
            out[index] = rounded.full_tensor()
    for dtype, shards in flat.items():
        for index, whole in zip(shards, _gather_flat(list(shards.values()), dtype), strict=True):
            out[index] = whole
    return [tensor for tensor in out if tensor is not None]


def _gather_flat(shards: Sequence[DTensor], dtype: torch.dtype) -> list[Tensor]:
    mesh = shards[0].device_mesh
    ranks = mesh.size()
    # FSDP's split: ceil(n / ranks) rows each until none are left.
    rows = [[_rows_of(shard.shape[0], rank, ranks) for shard in shards] for rank in range(ranks)]
    widths = [math.prod(shard.shape[1:]) for shard in shards]
    lengths = [sum(n * width for n, width in zip(of_rank, widths, strict=True)) for of_rank in rows]
    mine = torch.zeros(max(lengths), dtype=dtype, device=shards[0].to_local().device)
    local = [shard.to_local().reshape(-1) for shard in shards]
    copy_all(mine[: lengths[mesh.get_local_rank()]].split([len(t) for t in local]), local)
    everyone = mine.new_empty(ranks * len(mine))
    dist.all_gather_into_tensor(everyone, mine, group=mesh.get_group())
    parts = [
        row[:length].split([n * width for n, width in zip(of_rank, widths, strict=True)])
        for row, length, of_rank in zip(everyone.view(ranks, -1), lengths, rows, strict=True)
    ]
    return [torch.cat(pieces).view(shard.shape) for shard, pieces in zip(shards, zip(*parts, strict=True), strict=True)]


def _rows_of(total: int, rank: int, ranks: int) -> int:
    chunk = -(-total // ranks)
    return max(0, min(chunk, total - rank * chunk))


def on_mesh(value: Tensor) -> Tensor:
    """A shard that lies in host memory, on the device of its mesh; anything else as it is."""
    if isinstance(value, DTensor) and value.device.type != value.device_mesh.device_type:
        return value.to(value.device_mesh.device_type)
    return value


def _whole(value: Tensor) -> Tensor:
    value = on_mesh(value)
    return value.full_tensor() if isinstance(value, DTensor) else value
