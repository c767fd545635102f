"""Sigma grids whose shift follows the size of the picture: FLUX, Qwen-Image and their relatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler


def linear_mu(num_tokens: int, config: Mapping[str, Any]) -> float:
    """mu grows with the number of image tokens, along the line that the scheduler's config draws.

    The defaults and the order of operations are those of `calculate_shift` in diffusers' pipelines.
    """
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (top - base) / (high - low)
    return num_tokens * slope + (base - slope * low)


def falling_sigmas(num_steps: int) -> np.ndarray:
    """[N], 1 to 1/N, before any shift."""
    return np.linspace(1.0, 1 / num_steps, num_steps)


def euler_schedule(
    config: Mapping[str, Any], sigmas: Sequence[float] | np.ndarray | None, *, mu: float, shift: float | None
) -> FlowMatchEulerDiscreteScheduler:
    """A scheduler with its grid set. sigmas: [N] before the shift; mu: read where the config asks for dynamic shift.

    shift: replaces mu or the config's own. sigma' = s sigma / (1 + (s - 1) sigma) is what dynamic shift computes for
    mu = log s, so a given shift simply makes it static.
    """
    config = dict(config)
    if shift is not None:
        config |= {"use_dynamic_shifting": False, "shift": shift}
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    scheduler.set_timesteps(sigmas=sigmas, mu=mu)
    return scheduler
