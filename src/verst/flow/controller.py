"""The rollout of one latent stream of one request: draws noise, records latents and log-probs, step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verst.flow import transitions
from verst.flow.noise import SampleNoise
from verst.flow.transitions import Transition
from verst.types import StreamTrajectory

TRANSITIONS: dict[str, Callable[..., transitions.StepDistribution]] = {
    "sde": transitions.sde,
    "cps": transitions.cps,
    "dance": transitions.dance,
    "ode": transitions.ode,
}


def make_transition(kind: str, eta: float) -> Transition:
    """The transition `kind` ("sde", "cps", "dance", "ode") at noise level `eta` (ignored by ode)."""
    if kind == "ode":
        return transitions.ode
    return functools.partial(TRANSITIONS[kind], eta=eta)


@dataclass
class _Record:
    latents: dict[int, Tensor] = field(default_factory=dict)
    log_probs: dict[int, Tensor] = field(default_factory=dict)
    debug: dict[str, dict[int, Tensor]] = field(default_factory=dict)


class FlowRolloutController:
    """Owns noise, log-probs and trajectory of ONE stream of one request; holds no reference to the request.

    `transition` is passed to `FlowMatchEulerDiscreteScheduler.step`. Round first: the next latent is rounded to
    `storage_dtype`, and that value is recorded, fed on and taken the log-prob of.
    """

    def __init__(
        self,
        *,
        transition: Transition,
        sigmas: Tensor,
        noise: SampleNoise,
        sde_step_indices: Sequence[int],
        return_step_indices: Sequence[int] | None = None,
        storage_dtype: torch.dtype = torch.float32,
        log_prob_no_const: bool = False,
        debug: bool = False,
    ) -> None:
        """sigmas: [T+1] fp32, terminal 0. `return_step_indices` None keeps every latent; T names the final one."""
        num_steps = len(sigmas) - 1
        self._transition = transition
        self._sigmas = sigmas
        self._noise = noise
        self._sde_steps = frozenset(sde_step_indices)
        self._kept = frozenset(range(num_steps + 1) if return_step_indices is None else return_step_indices)
        self._storage_dtype = storage_dtype
        self._no_const = log_prob_no_const
        self._debug = debug
        self._record = _Record()
        for name, indices, last in (("sde", self._sde_steps, num_steps - 1), ("return", self._kept, num_steps)):
            wrong = sorted(i for i in indices if not 0 <= i <= last)
            if wrong:
                raise ValueError(f"{name}_step_indices {wrong} outside 0..{last} of a rollout of {num_steps} steps")

    def transition(
        self, *, model_output: Tensor, sample: Tensor, sigma: Tensor, next_sigma: Tensor, step_index: int
    ) -> Tensor:
        """One step of `sample` [B, ...] fp32 with velocity `model_output` [B, ...]: the next latent as stored."""
        self._keep(step_index, sample)
        x, v = sample.float(), model_output.float()
        rows = transitions.per_row(sigma.to(x).expand(len(x)), x)
        next_rows = transitions.per_row(next_sigma.to(x).expand(len(x)), x)
        if step_index not in self._sde_steps:
            x_next = self._round(transitions.ode(x, v, sigma=rows, next_sigma=next_rows).mean)
            self._record.log_probs[step_index] = torch.zeros(len(x), device=x.device)
            return x_next
        step = self._transition(x, v, sigma=rows, next_sigma=next_rows, first_sigma=self._sigmas[1].to(x))
        noise = self._noise.step(x.shape[1:]).to(x.device)
        x_next = self._round(step.mean + noise * step.std)
        self._record.log_probs[step_index] = transitions.gaussian_log_prob(
            x_next, step.mean, step.std, no_const=self._no_const
        )
        if self._debug:
            for key, value in (("noise", noise), ("mean", step.mean), ("std", step.std), ("model_output", v)):
                self._record.debug.setdefault(key, {})[step_index] = value.detach().cpu()
        return x_next

    def finalize(self, final: Tensor, *, timesteps: Tensor) -> list[StreamTrajectory]:
        """One trajectory a sample. final: [B, ...] after the last step; timesteps: [T] as the model was fed."""
        num_steps = len(self._sigmas) - 1
        self._keep(num_steps, final)
        steps = sorted(self._record.latents)
        indices = torch.tensor(steps, dtype=torch.int64)
        log_probs = torch.stack([self._record.log_probs[i] for i in range(num_steps)], dim=1).cpu()
        sigmas = self._sigmas.float().cpu()
        times = torch.cat([timesteps.float().cpu(), torch.zeros(1)])
        return [
            StreamTrajectory(
                latents=torch.stack([self._record.latents[i][row] for i in steps])
                if steps
                else final.new_zeros((0, *final.shape[1:])).cpu(),
                latent_step_indices=indices,
                sigmas=sigmas,
                timesteps=times,
                log_probs=log_probs[row].clone(),
                sde_step_indices=tuple(sorted(self._sde_steps)),
            )
            for row in range(len(final))
        ]

    @property
    def debug_tensors(self) -> dict[str, dict[int, Tensor]]:
        """name -> step -> [B, ...]: `noise`, `mean`, `std`, `model_output` of the stochastic steps, on the CPU."""
        return self._record.debug

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self._storage_dtype).float()

    def _keep(self, index: int, x: Tensor) -> None:
        if index in self._kept:
            self._record.latents[index] = x.detach().to(self._storage_dtype).cpu()


def join_transitions(parts: Sequence[tuple[int, FlowRolloutController]]) -> Callable[..., Tensor]:
    """A step transition over the rows of several requests batched together: (rows, controller) in batch order."""
    if len(parts) == 1:
        return parts[0][1].transition

    def transition(
        *, model_output: Tensor, sample: Tensor, sigma: Tensor, next_sigma: Tensor, step_index: int
    ) -> Tensor:
        done, out = 0, []
        for rows, controller in parts:
            piece = slice(done, done + rows)
            out.append(
                controller.transition(
                    model_output=model_output[piece],
                    sample=sample[piece],
                    sigma=sigma,
                    next_sigma=next_sigma,
                    step_index=step_index,
                )
            )
            done += rows
        return torch.cat(out)

    return transition
