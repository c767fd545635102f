"""Process group, mesh and FSDP2 sharding of a trainer rank."""

from __future__ import annotations

import functools
import sys
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from verst.config.sections import ParallelConfig
from verst.families.islands import is_island
from verst.families.sequence import SequenceGroups, sequence_groups, sequence_mesh
from verst.weights.lora import adaptable


def open_store(host: str, port: int, *, rank: int, world_size: int) -> TCPStore:
    """Where ranks find each other. Rank 0 opens it (port 0: any free one, see `.port`); the others join it."""
    return TCPStore(host, port, world_size, is_master=rank == 0, wait_for_workers=False)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a rank stands among the others."""

    fsdp: DeviceMesh
    """[shard], or [replicate, shard] for HSDP: all ranks, or those with the same part of each layer. The ranks of a
    sequence shard the model too."""
    data: dist.ProcessGroup
    """Ranks that see different samples and hold the same part of the tokens."""
    sequence: SequenceGroups | None
    """Ranks that see the same samples and share their tokens; None where each rank has all tokens."""
    tensor: DeviceMesh | None
    """Ranks that see the same samples and hold a part of each layer; None where each rank has whole layers."""

    @property
    def data_ranks(self) -> int:
        return dist.get_world_size(self.data)


def join_mesh(
    *,
    rank: int,
    world_size: int,
    store: Store,
    device: torch.device,
    parallel: ParallelConfig | None = None,
    offload: bool = False,
) -> Layout:
    """The process group (NCCL on CUDA, gloo on the CPU) and its meshes; by default FSDP2 over all ranks.

    offload: shards and gradients lie on the CPU, so that their norms are added up there: gloo too.

    Ranks are numbered [replicate, shard, ring, ulysses, tensor], the last one fastest: what talks most are neighbours.
    """
    parallel = parallel or ParallelConfig()
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl" if offload else "nccl"
    hook = sys.excepthook
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    # torch puts "[rank0]:" before every line of a traceback, once for each group that a process ever joined.
    sys.excepthook = hook
    copies = parallel.replicate
    degrees = {"replicate": copies, "shard": world_size // (copies * parallel.tensor), "tensor": parallel.tensor}
    kept = {name: degree for name, degree in degrees.items() if name == "shard" or degree > 1}
    # One mesh for both: FSDP2 shards what is cut by layers only along another dimension of the same mesh.
    whole = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    if parallel.tensor > 1:
        fsdp = whole["replicate", "shard"] if copies > 1 else whole["shard"]
        data = fsdp._flatten("data") if copies > 1 else fsdp
        return Layout(fsdp=fsdp, data=data.get_group(), sequence=None, tensor=whole["tensor"])
    if parallel.sequence == 1:
        assert dist.group.WORLD is not None
        return Layout(fsdp=whole, data=dist.group.WORLD, sequence=None, tensor=None)
    mesh = sequence_mesh(device.type, ulysses=parallel.ulysses, ring=parallel.ring)
    return Layout(fsdp=whole, data=mesh.get_group("data"), sequence=sequence_groups(mesh), tensor=None)


def leave_mesh() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(
    module: nn.Module,
    *,
    blocks: tuple[str, ...],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    fp32_modules: tuple[str, ...] = (),
    reduce_dtype: torch.dtype = torch.float32,
    offload: bool = False,
    frozen_whole: bool = False,
) -> None:
    """FSDP2 in place: each block whose class is named in `blocks`, then the rest.

    Parameters stay as they are; forward and backward run in `compute_dtype`. What stays fp32
    whatever the dtype (`Family.fp32_modules`: norms, time embeddings) stays whole on each rank and as it is, as in an
    engine: it is small, and needs no gathering then. Its gradients are `reduce_whole`'s. A model of which nothing is
    trained is kept in what it computes in: the same values, half the bytes.

    offload: shards lie in host memory, and so will their gradients. frozen_whole: frozen parameters stay whole too.
    """
    # Families slice the model's output and never write into it, which is all that this warning asks for.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Inputs are cast by the family: time must stay fp32 where the model wants it so.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False, output_dtype=None
    )
    away = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    wrap = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=away)
    for model in adaptable(module):
        half = compute_dtype != torch.float32
        kept = {
            p
            for name, p in model.named_parameters()
            if (half and is_island(name, fp32_modules)) or (frozen_whole and not p.requires_grad)
        }
        frozen = not any(p.requires_grad for p in model.parameters())
        for p in model.parameters():
            if p in kept:
                p.data = p.data.to(mesh.device_type)
            elif frozen and p.is_floating_point():
                p.data = p.data.to(compute_dtype)
        for child in list(model.modules()):
            if type(child).__name__ in blocks:
                wrap(child, ignored_params=kept)
        # Each expert is a root of its own: `velocity` calls it, never the ModuleDict around it.
        # By default a root keeps what it gathered until the backward, and the forward of a reference that swaps the
        # sharded weights would go through the gathered ones of the policy.
        wrap(model, reshard_after_forward=True, ignored_params=kept)
