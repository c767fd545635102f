"""Tensor parallelism of a family's transformer (Megatron-LM, arXiv 1909.08053), by torch's styles for linear layers.

Of each block a rank holds some heads and some hidden units: the columns of what makes them, the rows of what takes them.
What rows give is added over the ranks, so that between those two everything is whole and alike on every rank. Weights
are DTensors of their whole shape: FSDP2 shards them on, and a checkpoint knows no layout.

A LoRA goes with its layer: where columns are cut, B's are; where rows are cut, A's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from verst.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Of a transformer's list of equal blocks; a block may lack some of the modules."""

    blocks: str
    """Attribute of the transformer."""
    columns: tuple[str, ...]
    """Linear layers of a block that give heads or hidden units."""
    rows: tuple[str, ...]
    """Linear layers that take them."""
    norms: tuple[str, ...]
    """Modules between the two, whose parameters are whole: a rank's gradient of them is a part of it."""
    counted: tuple[str, ...] = ()
    """Attentions that split their channels by the number of their heads, which becomes the rank's own."""
    heads: str = "num_attention_heads"
    """Key of the transformer's config."""


@runtime_checkable
class SplitsTensors(Protocol):
    """A family whose blocks can be cut by heads and hidden units."""

    tensor_plan: TensorPlan


def check_tensor_degree(
    name: str, family: object, config: Mapping[str, Any], degree: int, *, fp32_modules: tuple[str, ...] = ()
) -> None:
    """config: the transformer's config.json; fp32_modules: what stays fp32 beside another dtype.

    Raises ConfigError, naming key, value and what would fit.
    """
    if degree == 1:
        return
    if not isinstance(family, SplitsTensors):
        raise ConfigError(
            f"trainer.parallel.tensor = {degree}: the layers of {name} are not cut over ranks; use tensor = 1 and ulysses"
        )
    if fp32_modules:
        raise ConfigError(
            f"trainer.parallel.tensor = {degree} with model.fp32_modules = {', '.join(fp32_modules)}: what stays fp32 stays "
            "whole on each rank, and layers are cut; use tensor = 1, or no such modules"
        )
    heads = config[family.tensor_plan.heads]
    if heads % degree:
        nearest = min((d for d in range(1, heads + 1) if heads % d == 0), key=lambda d: (abs(d - degree), d))
        raise ConfigError(
            f"trainer.parallel.tensor = {degree} does not divide the {heads} heads of {name}; nearest that does: {nearest}"
        )


def split_tensors(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> list[str]:
    """From now on `model`'s forward is a collective of `mesh`, whose ranks hold the same weights and see the same rows.

    Returns the names of the parameters of `plan.norms`: their gradients must be added over the ranks.
    """
    parts: list[str] = []
    for number, block in model.get_submodule(plan.blocks).named_children():
        present = dict(block.named_modules())
        for name in plan.columns:
            if name in present:
                _cut(present[name], mesh, columns=True)
        for name in plan.rows:
            if name in present:
                _cut(present[name], mesh, columns=False)
        for name in plan.counted:
            attention: Any = present.get(name)
            if attention is not None:
                attention.heads //= mesh.size()
        for name in plan.norms:
            if name in present:
                parts += [f"{plan.blocks}.{number}.{name}.{own}" for own, _ in present[name].named_parameters()]
    return parts


def _cut(layer: nn.Module, mesh: DeviceMesh, *, columns: bool) -> None:
    linears = [layer]
    if isinstance(layer, LoraLayer):
        linears = [layer.base_layer, *(layer.lora_B if columns else layer.lora_A).values()]
    for linear in linears:
        # Every rank has loaded, or drawn, the same values: none needs to be sent.
        parallelize_module(linear, mesh, ColwiseParallel() if columns else RowwiseParallel(), src_data_rank=None)
