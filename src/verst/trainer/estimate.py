"""What a trainer rank holds, item by item, from a model of shapes. docs/memory.md says what each is."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from verst.config.optimizers import AdamW8bitOptimizer, AdamWOptimizer, SgdOptimizer
from verst.config.sections import TrainerConfig
from verst.families.islands import is_island
from verst.trainer.footprint import TileBytes
from verst.weights.lora import adaptable

_MOMENTS: dict[type, Callable[[Any, int], float]] = {
    AdamWOptimizer: lambda _, master: 2 * master,
    # Two bytes, and two scales in fp32 for 256 values.
    AdamW8bitOptimizer: lambda _, __: 2 + 8 / 256,
    SgdOptimizer: lambda config, master: master if config.momentum else 0,
}
"""Bytes of optimizer state for each trained element."""
WORKSPACE = 64 * 2**20
"""cuBLAS takes 32 MiB a handle of torch's memory on a Hopper GPU; forward and backward run in two threads."""
Phase = Literal["always", "tile", "step"]


@dataclass(frozen=True, kw_only=True)
class Item:
    name: str
    bytes: int
    phase: Phase = "always"
    """While what it is there: all the time, or in a tile's forward and backward, or in the optimizer's step."""
    host: bool = False
    """In host memory, where it does not count."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """What an algorithm asks for beside the live weights."""

    average: bool = False
    """A moving average of the trained weights."""
    old: bool = False
    """The old policy, which samples."""
    frozen: bool = False
    """A frozen copy of the whole model: with a LoRA none is needed, the base without its adapter is one."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of elements of a model, as FSDP2 cuts it."""

    sharded: int
    islands: int
    """Whole on each rank, in fp32."""
    buffer_bytes: int
    """Of tables, whole on each rank."""
    trained: int
    """Of both."""
    largest_trained: int
    """Of one parameter."""
    block: int
    """Of the largest repeated block."""
    block_trained: int
    root: int
    """Outside of all blocks."""

    @classmethod
    def of(cls, module: nn.Module, blocks: Collection[str], fp32_modules: Collection[str]) -> Sizes:
        """`fp32_modules`: empty where the forward is in fp32 throughout."""
        islands = {id(p) for name, p in module.named_parameters() if is_island(name, tuple(fp32_modules))}
        repeated = [m for model in adaptable(module) for m in model.modules() if type(m).__name__ in blocks]

        def count(of: nn.Module, *, trained: bool = False) -> int:
            chosen = [p for p in of.parameters() if id(p) not in islands and (p.requires_grad or not trained)]
            return sum(p.numel() for p in chosen)

        total = count(module)
        trained = [p.numel() for p in module.parameters() if p.requires_grad]
        return cls(
            sharded=total,
            islands=sum(p.numel() for p in module.parameters() if id(p) in islands),
            buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
            trained=sum(trained),
            largest_trained=max(trained),
            block=max(count(m) for m in repeated),
            block_trained=max(count(m, trained=True) for m in repeated),
            root=total - sum(count(m) for m in repeated),
        )


def trainer_items(
    sizes: Sizes, tile: TileBytes, config: TrainerConfig, *, dtype: torch.dtype, lora: bool, tiles: int, copies: Copies
) -> list[Item]:
    """dtype: of the forward. tiles: of one optimizer step of a rank; `tile` has counted what `held_gradient` keeps."""
    shards = config.ranks // config.parallel.replicate
    compute, wide = dtype.itemsize, config.precision.master == "float32"
    master = 4 if wide else compute
    reduce = getattr(torch, config.precision.reduce).itemsize
    away, offload = config.offload.parameters, config.offload
    # A base that carries a LoRA is kept in what it computes in.
    weights = (sizes.sharded - sizes.trained) * compute + sizes.trained * master if lora else sizes.sharded * master
    own = -(-sizes.trained // shards)
    moments = _MOMENTS[type(config.optimizer)](config.optimizer, master)
    every = away or config.reduce_every_tile
    items = [
        Item(name="weights", bytes=weights // shards, host=away),
        Item(name="weights kept whole in fp32", bytes=sizes.islands * 4),
        Item(name="tables of the model", bytes=sizes.buffer_bytes),
        Item(name="optimizer state", bytes=int(own * moments), host=away or offload.optimizer),
        Item(name="moving average", bytes=copies.average * own * 4, host=offload.reference),
        Item(name="old policy", bytes=copies.old * own * 4, host=offload.reference),
        Item(name="frozen reference", bytes=copies.frozen * sizes.sharded * compute // shards, host=offload.reference),
    ]
    # With one rank FSDP2 copies a block out of its shard; with more there are buffers of the one before and after it.
    gathered = sizes.root + sizes.block * (1 if shards == 1 else 3)
    reduced = sizes.block_trained * (compute + reduce + reduce // shards)
    items += [
        Item(name="gathered weights", bytes=gathered * compute, phase="tile"),
        Item(name="gradients of one block", bytes=reduced, phase="tile"),
        Item(name="activations", bytes=tile.peak // config.parallel.sequence, phase="tile"),
    ]
    if tiles > 1 and not every:
        items.append(Item(name="gradients, whole", bytes=sizes.trained * reduce, phase="tile"))
    elif tiles > 1:
        items.append(Item(name="gradients of the tiles before", bytes=own * master, phase="tile", host=away))
    part = int(min(own, 2**30 // master) * moments)
    largest = -(-sizes.largest_trained // shards) * master
    items += [
        Item(name="gradients", bytes=own * master, phase="step", host=away),
        Item(name="in the optimizer's step", bytes=2 * largest, phase="step", host=away),
        Item(name="optimizer state brought in", bytes=part if offload.optimizer and not away else 0, phase="step"),
        Item(name="kernels' workspaces", bytes=WORKSPACE),
    ]
    return [item for item in items if item.bytes]


class HeldGradient:
    """What is left of a parameter's gradient after its backward, for `trace_tile`: this rank's shard.

    Nothing where it lies in host memory, or where gradients of tiles before have made the room for it.
    """

    def __init__(self, config: TrainerConfig, *, tiles: int, grad_itemsize: int) -> None:
        self._kept = tiles == 1 and not config.offload.parameters
        self._shards = config.ranks // config.parallel.replicate
        self._itemsize = grad_itemsize

    def __call__(self, gradient: Tensor) -> Tensor | None:
        if not self._kept:
            return None
        return gradient.new_empty(-(-gradient.numel() // self._shards) * self._itemsize, dtype=torch.uint8)


def peak_of(items: Collection[Item]) -> int:
    """Most bytes that a GPU has to give at a time."""
    sums = {
        phase: sum(i.bytes for i in items if i.phase == phase and not i.host) for phase in ("always", "tile", "step")
    }
    return sums["always"] + max(sums["tile"], sums["step"])


def host_of(items: Collection[Item]) -> int:
    return sum(item.bytes for item in items if item.host)


def gib(number: int) -> str:
    return f"{number / 2**30:.2f}" if number >= 2**30 / 100 else f"{math.ceil(number / 2**20) / 1024:.3f}"
