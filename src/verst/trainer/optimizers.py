"""The recipe's optimizer over shards and whole parameters, its state filled before the first step.

A filled state gives save and load the same tensors at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from verst.config import sections as s
from verst.trainer.adamw_8bit import AdamW8bit

Groups = list[dict[str, Any]]


def make_optimizer(config: s.TrainerConfig, parameters: Sequence[nn.Parameter]) -> Optimizer:
    # Shards of one mesh, and whole parameters, apart: torch's multi-tensor kernels do not take them in one list.
    kinds: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return OPTIMIZERS[type(config.optimizer)](config, [{"params": kind} for kind in kinds.values()])


def state_tensors(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """`<parameter>.<state>` -> tensor of the optimizer's own memory."""
    return {f"{name}.{key}": value for name, p in named.items() for key, value in optimizer.state[p].items()}


def _adamw(config: s.TrainerConfig, groups: Groups) -> Optimizer:
    assert isinstance(config.optimizer, s.AdamWOptimizer)
    parameters = [p for group in groups for p in group["params"]]
    chosen = config.optimizer.implementation
    if chosen == "auto":
        # Offloaded shards are stepped on the CPU, where the loop takes many times as long as one kernel.
        gpu = any(p.device_mesh.device_type == "cuda" if isinstance(p, DTensor) else p.is_cuda for p in parameters)
        chosen = "fused" if gpu else "for_loop"
    fused = chosen == "fused"
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=fused,
        foreach=chosen == "foreach",
    )
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }
    return optimizer


def _adamw_8bit(config: s.TrainerConfig, groups: Groups) -> Optimizer:
    return AdamW8bit(
        groups, lr=config.lr, betas=config.betas, eps=config.adam_epsilon, weight_decay=config.weight_decay
    )


def _sgd(config: s.TrainerConfig, groups: Groups) -> Optimizer:
    assert isinstance(config.optimizer, s.SgdOptimizer)
    optimizer = torch.optim.SGD(
        groups,
        lr=config.lr,
        momentum=config.optimizer.momentum,
        nesterov=config.optimizer.nesterov,
        weight_decay=config.weight_decay,
    )
    for group in groups:
        for p in group["params"]:
            # torch begins with the gradient itself, which is what a decayed 0 plus the gradient is.
            buffer = {"momentum_buffer": torch.zeros_like(p, memory_format=torch.preserve_format)}
            optimizer.state[p] = buffer if config.optimizer.momentum else {}
    return optimizer


OPTIMIZERS: dict[type, Callable[[s.TrainerConfig, Groups], Optimizer]] = {
    s.AdamWOptimizer: _adamw,
    s.AdamW8bitOptimizer: _adamw_8bit,
    s.SgdOptimizer: _sgd,
}
"""Section -> the optimizer."""
