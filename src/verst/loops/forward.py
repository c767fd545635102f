"""The transformer's forward in a run of one process, in the recipe's compute dtype."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from verst.families import Components
from verst.types import Conditioning, Latents


def velocity(
    components: Components,
    module: nn.Module,
    x: Latents,
    sigmas: Latents,
    conditioning: Conditioning,
    *,
    guidance_scale: float,
    dtype: torch.dtype,
) -> Latents:
    """`Family.velocity` of `module`, whose parameters may be kept in fp32: autocast computes in `dtype` then."""
    with _autocast(components.device, dtype):
        return components.family.velocity(module, x, sigmas, conditioning, guidance_scale=guidance_scale, dtype=dtype)


def keep_islands_in_fp32(transformer: nn.Module, components: Components) -> None:
    """Autocast leaves the family's fp32 modules alone: engines compute them in fp32."""
    for name, module in transformer.named_modules():
        if name.rpartition(".")[2] in components.family.fp32_modules:
            # Hooks, not another `forward`: a frozen copy of the model must not call the modules of the first.
            module.register_forward_pre_hook(functools.partial(_leave, components.device.type))
            module.register_forward_hook(_return, always_call=True)


def _leave(device_type: str, module: Any, args: object) -> None:
    module._verst_outside = torch.autocast(device_type, enabled=False)
    module._verst_outside.__enter__()


def _return(module: Any, args: object, out: object) -> None:
    module._verst_outside.__exit__(None, None, None)


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
