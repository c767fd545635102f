"""The rollout of one latent stream of one request: draws noise, records latents and log-probs, step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from verst.errors import ConfigError, InvariantError
from verst.flow import transitions
from verst.flow.noise import DrawNoise
from verst.flow.shards import Shards
from verst.flow.transitions import LogProbReduction, StepDistribution, Transition
from verst.types import StreamTrajectory

TRANSITIONS: dict[str, Callable[..., StepDistribution]] = {
    "sde": transitions.sde,
    "cps": transitions.cps,
    "dance": transitions.dance,
    "ode": transitions.ode,
}
LogProbOf = Literal["stored", "noise"]
"""stored: of the next latent as stored, which a trainer reproduces; noise: of the drawn noise, as SGLang-Diffusion."""


@runtime_checkable
class OdeTransition(Protocol):
    """A model's own deterministic update, in place of x + dt v.

    model_output and sample are this rank's part, [B, ...]; the result is the next latent, of sample's shape.
    """

    def __call__(self, *, model_output: Tensor, sample: Tensor, step_index: int) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """What a request asks of the controllers of all its streams."""

    transition: Transition
    """How a stochastic step moves."""
    sde_step_indices: tuple[int, ...] | None = None
    """Stochastic steps, 0-based; the others are deterministic. None = all, but none with the ode transition."""
    return_step_indices: tuple[int, ...] | None = None
    """Kept latents: i is the one entering step i, T the final one. None = all, () = none."""
    storage_dtype: torch.dtype = torch.float32
    """A latent is rounded to this; the rounded value is recorded, fed on and scored."""
    log_prob_of: LogProbOf = "stored"
    log_prob_no_const: bool = False
    """Only -(x' - mean)^2, which is defined without noise as well."""
    log_prob_reduction: LogProbReduction = "mean"
    debug: bool = False
    """Keep noise, mean, std and model output of the stochastic steps."""
    keep_conditioning: bool = False
    """Keep a copy of what the transformer was told."""


def make_transition(kind: str, eta: float) -> Transition:
    """The transition `kind` ("sde", "cps", "dance", "ode") at noise level `eta` (ignored by ode)."""
    if kind == "ode":
        return transitions.ode
    return functools.partial(TRANSITIONS[kind], eta=eta)


class FlowRolloutController:
    """Owns noise, log-probs and trajectory of ONE stream of one request; holds no reference to the request.

    `transition` is passed to `FlowMatchEulerDiscreteScheduler.step`. Round first: the next latent is rounded to the
    storage dtype and to the model output's (which the scheduler casts its result to), and that one value is recorded,
    fed on and, with `log_prob_of = "stored"`, taken the log-prob of.
    """

    def __init__(
        self,
        *,
        options: RolloutOptions,
        sigmas: Tensor,
        latent_shape: Sequence[int],
        noise: DrawNoise,
        shards: Shards | None = None,
        ode_transition: OdeTransition | None = None,
    ) -> None:
        """sigmas: [T+1] fp32, terminal 0. latent_shape: [B, ...], full, before sharding. shards: None = not sharded.

        Raises ConfigError for a step outside the grid, and for a stochastic step that has no noise and so no log-prob.
        """
        self._num_steps = len(sigmas) - 1
        self._options = options
        self._sigmas = sigmas
        self._latent_shape = tuple(latent_shape)
        self._noise = noise
        self._shards = shards
        self._ode_transition = ode_transition
        self._sde_steps = _sde_steps(options, self._num_steps)
        kept = options.return_step_indices
        self._kept = frozenset(range(self._num_steps + 1) if kept is None else kept)
        _refuse_outside("return_step_indices", self._kept, self._num_steps, self._num_steps)
        if not options.log_prob_no_const:
            self._refuse_noiseless()
        self._latents: dict[int, Tensor] = {}
        self._log_probs: dict[int, Tensor] = {}
        self._debug: dict[str, dict[int, Tensor]] = {}

    def transition(
        self, *, model_output: Tensor, sample: Tensor, sigma: Tensor, next_sigma: Tensor, step_index: int
    ) -> Tensor:
        """One step of `sample` with velocity `model_output`, both this rank's part of [B, ...]: the next latent, fp32.

        sigma, next_sigma: scalars. Raises InvariantError for a step that is not the next one.
        """
        if sigma.ndim or next_sigma.ndim:
            raise InvariantError(f"a rollout step has one sigma for all tokens, not {tuple(sigma.shape)}")
        if step_index != len(self._log_probs) or step_index >= self._num_steps:
            raise InvariantError(
                f"step {step_index} of a rollout of {self._num_steps} steps, {len(self._log_probs)} of which are done"
            )
        self._keep(step_index, sample)
        if step_index in self._sde_steps:
            return self._stochastic(model_output, sample, sigma, next_sigma, step_index)
        self._log_probs[step_index] = torch.zeros(len(sample), device=sample.device)
        if self._ode_transition is None:
            # As the plain scheduler writes it, dtypes untouched: a deterministic step is bit-equal to serving.
            x_next = sample + (next_sigma - sigma) * model_output
        else:
            x_next = self._ode_transition(model_output=model_output, sample=sample, step_index=step_index)
        return self._round(x_next, model_output.dtype)

    def finalize(self, final: Tensor, *, timesteps: Tensor) -> list[StreamTrajectory]:
        """One trajectory a sample; its latents are where the loop computed, the rest is on the CPU. final: this rank's part after the last step; timesteps: [T] as fed.

        A collective when sharded. Raises InvariantError when steps are missing.
        """
        if len(self._log_probs) != self._num_steps:
            raise InvariantError(f"{len(self._log_probs)} of the {self._num_steps} steps of a rollout were made")
        self._keep(self._num_steps, final)
        self._debug = {
            name: {step: (x if name in ("noise", "std") else self._full(x)).cpu() for step, x in values.items()}
            for name, values in self._debug.items()
        }
        steps = sorted(self._latents)
        latents = torch.empty((len(final), 0, *self._latent_shape[1:]), dtype=self._options.storage_dtype)
        if steps:
            stacked = torch.stack([self._latents[i] for i in steps], dim=1)
            latents = self._full(stacked.flatten(0, 1)).unflatten(0, stacked.shape[:2])
        log_probs = torch.stack([self._log_probs[i] for i in range(self._num_steps)], dim=1).cpu()
        return [
            StreamTrajectory(
                latents=latents[row],
                latent_step_indices=torch.tensor(steps, dtype=torch.int64),
                sigmas=self._sigmas.float().cpu(),
                timesteps=torch.cat([timesteps.float().cpu(), torch.zeros(1)]),
                log_probs=log_probs[row].clone(),
                sde_step_indices=tuple(sorted(self._sde_steps)),
            )
            for row in range(len(final))
        ]

    @property
    def debug_tensors(self) -> dict[str, dict[int, Tensor]]:
        """name -> step -> [B, ...], full: `noise`, `mean`, `std`, `model_output` of the stochastic steps.

        On the CPU, once the rollout is finalized.
        """
        return self._debug

    def _stochastic(
        self, model_output: Tensor, sample: Tensor, sigma: Tensor, next_sigma: Tensor, index: int
    ) -> Tensor:
        x, v = sample.float(), model_output.float()
        step = self._distribution(x, v, sigma, next_sigma)
        noise = self._noise(self._latent_shape[1:]).to(x.device)
        local = noise if self._shards is None else self._shards.shard(noise)
        if local.shape != x.shape:
            raise InvariantError(
                f"noise {tuple(local.shape)} for a latent {tuple(x.shape)}: the full latent is {self._latent_shape}"
            )
        x_next = self._round(step.mean + local * step.std, model_output.dtype)
        self._log_probs[index] = self._log_prob(x_next, step, noise)
        if self._options.debug:
            for name, value in (("noise", noise), ("mean", step.mean), ("std", step.std), ("model_output", v)):
                self._debug.setdefault(name, {})[index] = value.detach()
        return x_next

    def _distribution(self, x: Tensor, v: Tensor, sigma: Tensor, next_sigma: Tensor) -> StepDistribution:
        return self._options.transition(
            x,
            v,
            sigma=transitions.per_row(sigma.to(x).expand(len(x)), x),
            next_sigma=transitions.per_row(next_sigma.to(x).expand(len(x)), x),
            first_sigma=self._sigmas[1].to(x),
        )

    def _log_prob(self, x_next: Tensor, step: StepDistribution, noise: Tensor) -> Tensor:
        """[B] on the full tensor: the reduction over a part would depend on how the latent is cut."""
        no_const, reduction = self._options.log_prob_no_const, self._options.log_prob_reduction
        if self._options.log_prob_of == "noise":
            return transitions.noise_log_prob(noise, step.std, no_const=no_const, reduction=reduction)
        x_full, mean = x_next, step.mean
        if self._shards is not None:
            x_full, mean = self._shards.gather(torch.cat([x_next, mean])).chunk(2)
        return transitions.gaussian_log_prob(x_full, mean, step.std, no_const=no_const, reduction=reduction)

    def _refuse_noiseless(self) -> None:
        zero = torch.zeros(1, 1)
        for i in sorted(self._sde_steps):
            sigma, next_sigma = self._sigmas[i].cpu(), self._sigmas[i + 1].cpu()
            if not self._distribution(zero, zero, sigma, next_sigma).std > 0:
                raise ConfigError(
                    f"sde_step_indices has {i}, where the transition from sigma {sigma:.4g} to {next_sigma:.4g} leaves no "
                    "noise (std = 0) and so no log-prob: leave the step out, or use log_prob_no_const"
                )

    def _round(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """To the storage dtype and to `dtype`, the one that the scheduler casts its result to."""
        return x.to(self._options.storage_dtype).to(dtype).float()

    def _full(self, local: Tensor) -> Tensor:
        return local if self._shards is None else self._shards.gather(local)

    def _keep(self, index: int, x: Tensor) -> None:
        if index in self._kept:
            self._latents[index] = x.detach().to(self._options.storage_dtype)


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


def _sde_steps(options: RolloutOptions, num_steps: int) -> frozenset[int]:
    chosen = options.sde_step_indices
    if chosen is None:
        chosen = () if options.transition is transitions.ode else tuple(range(num_steps))
    steps = frozenset(chosen)
    _refuse_outside("sde_step_indices", steps, num_steps - 1, num_steps)
    return steps


def _refuse_outside(name: str, indices: frozenset[int], last: int, num_steps: int) -> None:
    wrong = sorted(i for i in indices if not 0 <= i <= last)
    if wrong:
        raise ConfigError(f"{name} {wrong} outside 0..{last} of a rollout of {num_steps} steps")
