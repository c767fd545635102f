"""What video families have in common: pixel layout, and schedulers that are not Euler's."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from verst.errors import ModelError, RequestError
from verst.families.base import Components
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Geometry


def check_frames(geometry: Geometry, *, factor: int) -> None:
    """Raises RequestError unless there are 1 + k * `factor` frames."""
    frames = geometry.num_frames
    if (frames - 1) % factor:
        nearest = 1 + max(0, round((frames - 1) / factor)) * factor
        raise RequestError(f"num_frames = {frames} is not 1 + a multiple of {factor}; nearest that is: {nearest}")


def to_clip(media: Tensor, vae: Any) -> Tensor:
    """uint8 [B, F, H, W, 3] -> [B, 3, F, H, W] in [-1, 1], of the autoencoder's device and dtype."""
    return media.permute(0, 4, 1, 2, 3).to(vae.device, vae.dtype) / 127.5 - 1


def to_pixels(clip: Tensor) -> Tensor:
    """The inverse for a decoded clip: [B, 3, F, H, W] -> fp32 [B, F, 3, H, W] in [0, 1]."""
    return (clip * 0.5 + 0.5).clamp(0, 1).float().transpose(1, 2)


def module_dtype(transformer: nn.Module) -> torch.dtype:
    """What a diffusers transformer computes in: the dtype of the layers that are not kept in fp32."""
    dtype: torch.dtype = cast(Any, transformer).dtype
    return dtype


def whole_timesteps(sigma: Tensor) -> Tensor:
    """The int64 timesteps of UniPC and DPM-Solver, which cut the fraction of 1000 sigma off.

    They do so in fp64 before sigma is rounded: of their grids of up to 100 steps the fp32 product misses one timestep
    in 700, by one, where 1000 sigma is a whole number.
    """
    return (sigma.float() * 1000).floor().long()


def euler_on_flow_sigmas(
    components: Components, *, num_steps: int, shift: float | None, sigmas: np.ndarray | None = None
) -> FlowMatchEulerDiscreteScheduler:
    """Euler's scheduler on the grid of the checkpoint's own one, with a static shift.

    Multistep solvers (UniPC, DPM-Solver++) look back over several steps, so that a step is not a function of the
    latent alone; their sigmas and timesteps are kept, the update is Euler's. sigmas: [N] before the shift, where the
    pipeline does not leave them to the scheduler. Raises ModelError for one that is no flow-matching scheduler.
    """
    config = dict(components.modules["scheduler"].config)
    flow_euler = "shift" in config and "flow_shift" not in config
    if shift is not None:
        config["shift" if flow_euler else "flow_shift"] = shift
    if flow_euler:
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
        scheduler.set_timesteps(num_steps, sigmas=sigmas)
        return scheduler
    own_class = type(components.modules["scheduler"])
    if not config.get("use_flow_sigmas"):
        raise ModelError(f"{components.folder / 'scheduler'}: {own_class.__name__} without use_flow_sigmas is no flow")
    own = own_class.from_config(config)
    own.set_timesteps(num_steps, **({} if sigmas is None else {"sigmas": sigmas}))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=config["flow_shift"])
    scheduler.set_timesteps(num_steps)
    scheduler.sigmas = own.sigmas.to(torch.float32)
    scheduler.timesteps = own.timesteps.to(torch.float32)  # Euler's takes no integers.
    scheduler.set_begin_index(0)
    return scheduler
