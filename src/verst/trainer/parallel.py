"""Process group, mesh and FSDP2 sharding of a trainer rank."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from verst.weights.lora import adaptable


def open_store(host: str, port: int, *, rank: int, world_size: int) -> TCPStore:
    """Where ranks find each other. Rank 0 opens it (port 0: any free one, see `.port`); the others join it."""
    return TCPStore(host, port, world_size, is_master=rank == 0, wait_for_workers=False)


def join_mesh(*, rank: int, world_size: int, store: Store, device: torch.device) -> DeviceMesh:
    """A one-dimensional mesh over all trainer ranks: NCCL on CUDA, gloo on the CPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    hook = sys.excepthook
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    # torch puts "[rank0]:" before every line of a traceback, once for each group that a process ever joined.
    sys.excepthook = hook
    return init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))


def leave_mesh() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _kept_in_fp32(model: Any) -> set[nn.Parameter]:
    """Frozen parameters under the modules that diffusers' from_pretrained never casts."""
    names = frozenset(model._keep_in_fp32_modules or ())
    return {p for name, p in model.named_parameters() if not p.requires_grad and names.intersection(name.split("."))}


def shard(module: nn.Module, *, blocks: tuple[str, ...], mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """FSDP2 in place: each block whose class is named in `blocks`, then the rest.

    Parameters stay fp32; forward and backward run in `compute_dtype`, gradients are reduced in fp32. Frozen parameters
    that the model keeps in fp32 whatever its dtype (norms, time embeddings) stay whole on each rank and as they are, as
    in an engine.
    """
    # Families slice the model's output and never write into it, which is all that this warning asks for.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Inputs are cast by the family: time must stay fp32 where the model wants it so.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False, output_dtype=None
    )
    for model in adaptable(module):
        kept = set() if compute_dtype == torch.float32 else _kept_in_fp32(model)
        for child in list(model.modules()):
            if type(child).__name__ in blocks:
                fully_shard(child, mesh=mesh, mp_policy=policy, ignored_params=kept)
        # Each expert is a root of its own: `velocity` calls it, never the ModuleDict around it.
        # By default a root keeps what it gathered until the backward, and the forward of a reference that swaps the
        # sharded weights would go through the gathered ones of the policy.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=kept)
