"""Gradients of parameters that FSDP2 leaves whole on each rank (fp32 islands), beside those of its shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def whole_parameters(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if not isinstance(p, DTensor)]


@torch.no_grad()
def reduce_whole(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Means of the gradients over all ranks of `mesh`, as FSDP2 makes them of its shards; a collective.

    In one flat message, in the parameters' own dtype. A parameter that no rank has used keeps no gradient; where only
    some have, the others bring zeros.
    """
    if not parameters or mesh.size() == 1:
        return
    used = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([used, *(grad.reshape(-1) for grad in grads)])
    for dim in range(mesh.ndim):
        dist.all_reduce(flat, group=mesh.get_group(dim))
    used, *sums = flat.split([len(used), *(grad.numel() for grad in grads)])
    for p, total, count in zip(parameters, sums, used.tolist(), strict=True):
        p.grad = (total / mesh.size()).view_as(p) if count else None


@torch.no_grad()
def add_parts(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sums of the gradients over ranks of which each has a part of them; a collective, in one flat message."""
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    if not grads:
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 over all: those of one mesh, and whole ones, are added up apart, since torch does not mix them."""
    kinds: dict[DeviceMesh | None, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        kinds.setdefault(mesh, []).append(gradient)
    norms = [full(torch.nn.utils.get_total_norm(part, foreach=False)) for part in kinds.values()]
    # Those of offloaded shards are on the CPU.
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])) if norms[1:] else norms[0]


def full(value: Tensor) -> Tensor:
    """Whole on every rank; a collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value
