"""The denoise loop of the native engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler, StepTransition
from verst.types import Latents

Velocity = Callable[[Latents, dict[str, Tensor]], Latents]
"""(stream -> [B, ...] latents, stream -> [B] sigmas) -> stream -> [B, ...] velocity, fp32, guided."""


@torch.no_grad()
def denoise(
    velocity: Velocity,
    latents: Latents,
    schedulers: Mapping[str, FlowMatchEulerDiscreteScheduler],
    *,
    transitions: Mapping[str, StepTransition] | None = None,
) -> Latents:
    """From noise to clean latents: one velocity a step for all streams, one scheduler step for each stream.

    A serving request passes no transitions and gets diffusers' Euler update; a rollout passes its controllers'.
    """
    transitions = transitions or {}
    first = next(iter(schedulers.values()))
    for index in range(len(first.timesteps)):
        sigma = {
            name: s.sigmas[index].to(latents[name].device).expand(len(latents[name])) for name, s in schedulers.items()
        }
        v = velocity(latents, sigma)
        latents = {
            name: scheduler.step(
                v[name],
                scheduler.timesteps[index],
                latents[name],
                return_dict=False,
                **({"transition": transitions[name]} if name in transitions else {}),
            )[0]
            for name, scheduler in schedulers.items()
        }
    return latents
