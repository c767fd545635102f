"""diffusers' flow-matching Euler scheduler with one more argument: the transition of a rollout.

The scheduler knows nothing of rollouts: it hands whatever `transition` it was given the model output and its two
noise levels, and is plain diffusers without one.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol, cast, runtime_checkable

import torch
from diffusers.schedulers import scheduling_flow_match_euler_discrete as upstream
from torch import Tensor


@runtime_checkable
class StepTransition(Protocol):
    """What a caller passes to `step`: replaces the Euler update of that step."""

    def __call__(
        self, *, model_output: Tensor, sample: Tensor, sigma: Tensor, next_sigma: Tensor, step_index: int
    ) -> Tensor: ...


_Upstream: Any = upstream.FlowMatchEulerDiscreteScheduler
"""Untyped: its annotations name numpy arrays and FloatTensor where it holds and takes tensors."""


class FlowMatchEulerDiscreteScheduler(_Upstream):
    """The grid is shared, the step index is not: a loop steps the copy that `for_request` gives it."""

    sigmas: Tensor
    """[T+1] fp32, terminal 0; set by `set_timesteps`."""
    timesteps: Tensor
    """[T] fp32."""

    def for_request(self) -> FlowMatchEulerDiscreteScheduler:
        """A scheduler of the same grid that stands before its first step.

        It shares the grid's tensors, which nobody writes into, and holds a step index of its own: what happens to
        this object afterwards, a new grid included, does not reach it. It counts its steps and never looks a
        timestep up, so equal or fractional timesteps are no matter.
        """
        own = copy.copy(self)
        own._step_index = None
        own.set_begin_index(0)
        return own

    def step(
        self,
        model_output: Tensor,
        timestep: Tensor | float | int,
        sample: Tensor,
        *args: Any,
        transition: StepTransition | None = None,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """As in diffusers; with `transition` the update is the transition's, in fp32.

        The result has the model output's dtype, as in diffusers. Raises ValueError for an integer timestep, which
        would be an index into the grid and not a point of it.
        """
        if transition is None:
            return super().step(model_output, timestep, sample, *args, return_dict=return_dict, **kwargs)
        if not isinstance(timestep, Tensor) or not timestep.is_floating_point():
            raise ValueError(f"timestep = {timestep}: pass one of scheduler.timesteps, which are floats")
        if self.step_index is None:
            self._init_step_index(timestep)
        index = self.step_index
        assert index is not None
        next_sample = transition(
            model_output=model_output,
            sample=sample.to(torch.float32),
            sigma=self.sigmas[index],
            next_sigma=self.sigmas[index + 1],
            step_index=index,
        ).to(model_output.dtype)
        self._step_index = index + 1
        if not return_dict:
            return (next_sample,)
        return upstream.FlowMatchEulerDiscreteSchedulerOutput(prev_sample=cast(Any, next_sample))
