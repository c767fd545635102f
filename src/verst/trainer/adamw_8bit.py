"""AdamW whose moments take 8 bits a value (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").

A moment is a code into 256 values in [-1, 1] times the largest magnitude of its block of 256 values. Blocks never
straddle rows, so that they are the same however FSDP2 shares out the rows: codes and scales are tensors like any other
in checkpoints and in host memory, and go on in another layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

BLOCK = 256
_SMALLEST = 4096
"""Values of a parameter below which moments stay as they are: small ones save nothing and suffer most."""


class AdamW8bit(Optimizer):
    """The step itself is torch.optim.AdamW's, in fp32, one parameter at a time."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, **defaults: Any) -> None:
        """defaults: betas, eps, weight_decay. State is there from the start."""
        super().__init__(groups, {"lr": lr, **defaults})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": torch.zeros((), dtype=torch.float32)}
                for moment in ("exp_avg", "exp_avg_sq"):
                    self.state[p] |= _codes_of(p, moment) if is_packed(p) else {moment: torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group)

    def _step(self, p: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), state = group["betas"], self.state[p]
        state["step"] += 1
        step = float(state["step"])
        g, w = _local(p.grad).float(), _local(p)
        m = _read(state, "exp_avg", _SIGNED).lerp_(g, 1 - beta1)
        v = _read(state, "exp_avg_sq", _UNSIGNED).lerp_(g * g, 1 - beta2)
        denominator = v.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        updated = w.float().mul(1 - group["lr"] * group["weight_decay"])
        w.copy_(updated.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**step)))
        _write(state, "exp_avg", _SIGNED, m)
        _write(state, "exp_avg_sq", _UNSIGNED, v)


def is_packed(p: Tensor) -> bool:
    """Whether rows are whole blocks, on every rank."""
    placements = p.placements if isinstance(p, DTensor) else ()
    by_rows = all(placement in (Shard(0), Replicate()) for placement in placements)
    return by_rows and p.numel() >= _SMALLEST and math.prod(p.shape[1:]) % BLOCK == 0


@functools.cache
def dynamic_map(signed: bool) -> Tensor:
    """[256] fp32, rising: seven decades with ever more values in each, 0 and 1 (the paper's figure 2; dynamic tree type)."""
    decades = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent if signed else exponent + 1) + 1, dtype=torch.float64)
        decades.append(10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2)
    positive = torch.cat(decades)
    values = [-positive, positive] if signed else [positive]
    return torch.cat([*values, torch.tensor([0.0, 1.0], dtype=torch.float64)]).sort().values.float()


_SIGNED, _UNSIGNED = True, False


@functools.cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values, and the borders between their neighbourhoods."""
    values = dynamic_map(signed)
    return values.to(device), ((values[:-1] + values[1:]) / 2).to(device)


def _codes_of(p: Tensor, moment: str) -> dict[str, Tensor]:
    """Of zeros, shared out over ranks as `p` is."""
    blocks = math.prod(p.shape[1:]) // BLOCK
    zero = int(torch.searchsorted(dynamic_map(moment == "exp_avg"), 0.0))
    scale = torch.zeros_like(p.detach().flatten(1)[:, :blocks], dtype=torch.float32).contiguous()
    return {f"{moment}.codes": torch.full_like(p, zero, dtype=torch.uint8), f"{moment}.scale": scale}


def _read(state: dict[str, Tensor], moment: str, signed: bool) -> Tensor:
    """In fp32, a copy; of a shard, this rank's rows."""
    if moment in state:
        return _local(state[moment]).to(torch.float32, copy=True)
    codes, scale = _local(state[f"{moment}.codes"]), _local(state[f"{moment}.scale"])
    values, _ = _tables(signed, codes.device)
    return (values[codes.int()].view(-1, BLOCK) * scale.view(-1, 1)).view(codes.shape)


def _write(state: dict[str, Tensor], moment: str, signed: bool, value: Tensor) -> None:
    if moment in state:
        _local(state[moment]).copy_(value)
        return
    blocks = value.reshape(-1, BLOCK)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    _, borders = _tables(signed, value.device)
    codes = torch.bucketize(blocks / torch.where(largest > 0, largest, 1), borders, out_int32=True)
    if not signed:
        # A second moment that is rounded to 0 would divide a first moment that is not.
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    _local(state[f"{moment}.codes"]).copy_(codes.view(value.shape))
    scale = _local(state[f"{moment}.scale"])
    scale.copy_(largest.view(scale.shape))


def _local(value: Any) -> Tensor:
    local: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return local
