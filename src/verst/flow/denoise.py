"""The denoise loop of the native engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from verst.errors import InvariantError
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

    A serving request passes no transitions and gets diffusers' Euler update; a rollout passes its controllers'. The
    loop steps copies of the schedulers: the caller's may be shared by other loops at the same time.

    Raises InvariantError when streams do not match: in latents, schedulers, transitions or what `velocity` returns.
    """
    transitions = transitions or {}
    own = {name: scheduler.for_request() for name, scheduler in schedulers.items()}
    _same_streams("the latents", latents, own)
    if transitions:
        _same_streams("the transitions", transitions, own)
    num_steps = {len(scheduler.timesteps) for scheduler in own.values()}
    if len(num_steps) != 1:
        raise InvariantError(f"streams that are denoised together need equally many steps, not {sorted(num_steps)}")
    for index in range(num_steps.pop()):
        sigma = {name: s.sigmas[index].to(latents[name].device).expand(len(latents[name])) for name, s in own.items()}
        v = velocity(latents, sigma)
        _same_streams("the velocity", v, own)
        latents = {
            name: scheduler.step(
                v[name],
                scheduler.timesteps[index],
                latents[name],
                return_dict=False,
                **({"transition": transitions[name]} if transitions else {}),
            )[0]
            for name, scheduler in own.items()
        }
    return latents


def _same_streams(what: str, found: Mapping[str, object], schedulers: Mapping[str, object]) -> None:
    if found.keys() != schedulers.keys():
        raise InvariantError(f"{what} have the streams {sorted(found)}, the schedulers {sorted(schedulers)}")
