"""The transformer's forward in a run of one process, in the recipe's compute dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from verst.families import Components
from verst.types import Conditioning, Latents
from verst.weights.lora import adaptable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def keep_islands_in_fp32(transformer: nn.Module) -> None:
    """Autocast leaves alone what diffusers never casts (time embeddings, norms): engines compute it in fp32."""
    for model in adaptable(transformer):
        names = set(getattr(model, "_keep_in_fp32_modules", None) or ())
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in names:
                _wrap(module)


def _wrap(module: Any) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        device = next(module.parameters()).device
        with torch.autocast(device.type, enabled=False):
            return inner(*args, **kwargs)

    module.forward = forward


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
