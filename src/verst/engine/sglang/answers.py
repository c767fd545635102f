"""What a server answered, compared with what was asked, and as a rollout of ours.

SGLang-Diffusion repeats neither noise level nor steps. But the grid comes back, the first latent is a function of the seed,
and its log-probs are one of seed, grid, transition and noise level alone, so that all of them can be proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verst.engine.resolve import Resolved
from verst.engine.sglang.families import Pipeline
from verst.engine.sglang.requests import kept_steps, wanted_steps
from verst.errors import EngineError
from verst.flow import transitions
from verst.flow.controller import make_transition
from verst.flow.noise import SampleNoise
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import StreamTrajectory

LOG_PROB_BOUND = 1e-5
"""Of a mean over elements in fp32, which two devices add up in two orders."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """One sample."""

    pixels: Tensor
    """fp32 [1, 3, H, W] in [0, 1]."""
    trajectory: StreamTrajectory
    """Of the latents that the request wants."""
    positive: dict[str, Tensor] | None
    """name -> [1, ...]; None where it was not asked for."""
    negative: dict[str, Tensor] | None
    seconds: float


class Answers:
    """Reads the answers of one server. `noise` are the devices on which its noise may be drawn."""

    def __init__(self, url: str, pipeline: Pipeline, *, stream: str, noise: tuple[torch.device, ...]) -> None:
        """noise: () = the seed is not proven."""
        self._url, self._pipeline, self._stream, self._noise = url, pipeline, stream, noise
        self.device: torch.device | None = None
        """Where the server draws, once an answer has shown it."""

    def read(
        self,
        job: Resolved,
        row: int,
        record: Mapping[str, Any],
        scheduler: FlowMatchEulerDiscreteScheduler,
        shape: tuple[int, ...],
    ) -> Made:
        """shape: of one latent. Raises EngineError, naming what differs."""
        for name, asked in (("prompt", job.prompts[row]), ("seed", job.seeds[row])):
            if record.get(name) != asked:
                raise self._wrong(f"{name} = {record.get(name)!r}, {asked!r} was asked for")
        path = record.get("dit_trajectory")
        if path is None:
            raise self._wrong("no trajectory")
        sigmas = path["sigmas"].float()
        if not torch.equal(sigmas, scheduler.sigmas.float().cpu()):
            raise self._wrong(f"sigmas {sigmas.tolist()}, the grid is {scheduler.sigmas.tolist()}")
        kept = kept_steps(job)
        latents: Tensor = path["latents"]
        if tuple(latents.shape) != (len(kept), *shape):
            raise self._wrong(f"latents {list(latents.shape)}, {[len(kept), *shape]} were asked for")
        timesteps = torch.cat([scheduler.timesteps.float().cpu(), torch.zeros(1)])
        if not torch.equal(path["timesteps"].float(), timesteps[list(kept)]):
            raise self._wrong(f"timesteps {path['timesteps'].tolist()}, {timesteps[list(kept)].tolist()} belong there")
        log_probs: Tensor = record["rollout_log_probs"]
        if tuple(log_probs.shape) != (job.num_steps,):
            raise self._wrong(f"{tuple(log_probs.shape)} log-probs of {job.num_steps} steps")
        self._prove_noise(job, row, latents[0], log_probs, sigmas)
        wanted = [kept.index(step) for step in wanted_steps(job)]
        positive, negative = self._conditioning(job, record)
        pixels: Tensor = record["generated_output"]
        return Made(
            pixels=pixels.unsqueeze(0),
            trajectory=StreamTrajectory(
                latents=latents[wanted].float(),
                latent_step_indices=torch.tensor([kept[i] for i in wanted], dtype=torch.int64),
                sigmas=sigmas,
                timesteps=timesteps,
                log_probs=log_probs.float(),
                sde_step_indices=job.sde_steps,
            ),
            positive=positive,
            negative=negative,
            seconds=float(record.get("inference_time_s") or 0.0),
        )

    def _prove_noise(self, job: Resolved, row: int, first: Tensor, log_probs: Tensor, sigmas: Tensor) -> None:
        """That seed, transition, noise level and steps were those of the request."""
        for device in (self.device,) if self.device is not None else self._noise:
            noise = SampleNoise([job.seeds[row]], device=device)
            if not torch.equal(noise.initial(first.shape)[0].cpu(), first.float()):
                continue
            self.device = device
            expected = _log_probs(job, noise, self._stream, sigmas, first.shape)
            if not torch.allclose(log_probs.float(), expected, rtol=LOG_PROB_BOUND, atol=LOG_PROB_BOUND):
                raise self._wrong(
                    f"log-probs {log_probs.tolist()}, of {job.request.rollout_sde_type} with noise level "
                    f"{job.request.rollout_noise_level} at the steps {list(job.sde_steps)} they are {expected.tolist()}"
                )
            return
        if self._noise:
            raise self._wrong(
                f"an initial latent that is not that of seed {job.seeds[row]} on {' or '.join(map(str, self._noise))}; where "
                "the server draws on a GPU that this process has none like, set engine.check_noise = false"
            )

    def _conditioning(
        self, job: Resolved, record: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]:
        environment = record.get("denoising_env")
        if environment is None:
            return None, None
        positive = self._rows(environment.get("pos_cond_kwargs") or {})
        negative = self._rows(environment["neg_cond_kwargs"]) if environment.get("neg_cond_kwargs") else None
        if job.guided != (negative is not None):
            raise self._wrong(
                f"{'no' if negative is None else 'a'} negative side at guidance_scale = {job.guidance_scale}"
            )
        return positive, negative

    def _rows(self, side: Mapping[str, Any]) -> dict[str, Tensor]:
        """name -> [1, ...]: whether the batch dimension comes along depends on the number of outputs."""
        names = self._pipeline.conditioning
        if absent := [name for name in names if not isinstance(side.get(name), Tensor)]:
            raise self._wrong(f"no {', '.join(absent)} in its denoising_env, which has {sorted(side)}")
        sequence: Tensor = side[self._pipeline.sequence]
        batched = sequence.ndim == 3
        tokens = self._pipeline.clip_tokens + self._pipeline.sequence_length
        if sequence.shape[-2] != tokens:
            raise self._wrong(f"{self._pipeline.sequence} of {sequence.shape[-2]} tokens, {tokens} were expected")
        return {name: (side[name] if batched else side[name].unsqueeze(0)).clone() for name in names}

    def _wrong(self, what: str) -> EngineError:
        return EngineError(f"SGLang at {self._url} answered {what}")


def _log_probs(job: Resolved, noise: SampleNoise, stream: str, sigmas: Tensor, shape: torch.Size) -> Tensor:
    """[T] fp32: of the drawn noise, which depends on no weight. noise: after the initial latent."""
    draw = noise.steps(stream)
    transition = make_transition(job.request.rollout_sde_type, job.request.rollout_noise_level)
    expected = torch.zeros(job.num_steps)
    zero = torch.zeros(1, *[1] * len(shape))
    for step in job.sde_steps:
        sigma, next_sigma = (transitions.per_row(sigmas[i].expand(1), zero) for i in (step, step + 1))
        std = transition(zero, zero, sigma=sigma, next_sigma=next_sigma, first_sigma=sigmas[1]).std
        drawn = draw(shape).cpu()
        no_const = job.request.rollout_log_prob_no_const
        expected[step] = transitions.noise_log_prob(drawn, std, no_const=no_const, reduction="mean")[0]
    return expected
