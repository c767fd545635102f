"""One sample of a request in SGLang-Diffusion's words; what its contract lacks is refused by name."""

from __future__ import annotations

from typing import Any

from verst.engine.resolve import Resolved
from verst.engine.sglang.families import Pipeline
from verst.errors import RequestError


def refuse_what_it_lacks(job: Resolved, pipeline: Pipeline) -> None:
    """Raises RequestError, naming field, value and what would be right."""
    request = job.request
    if request.initial_seeds is not None and request.initial_seeds != job.seeds:
        raise RequestError("initial_seeds: SGLang draws initial latent and steps from one seed; leave it out")
    for name, wanted in (
        ("rollout_share_prefix", False),
        ("rollout_debug_mode", False),
        ("rollout_storage_dtype", "float32"),
        ("rollout_log_prob_reduction", "mean"),
        ("rollout_log_prob_of", "noise"),
    ):
        if request.rollout and getattr(request, name) != wanted:
            raise RequestError(f"{name} = {getattr(request, name)!r}: SGLang has {wanted!r} alone")
    if request.rollout and request.rollout_sde_type == "dance":
        raise RequestError('rollout_sde_type = "dance" is no transition of SGLang; use "sde", "cps" or "ode"')
    if job.guided and request.guidance_passes != "two":
        raise RequestError(
            f'guidance_passes = {request.guidance_passes!r}: SGLang makes a forward for each side; use "two"'
        )
    if job.images.sizes:
        raise RequestError(f"image_path: {pipeline.name} takes no picture")
    if job.max_sequence_length != pipeline.sequence_length:
        raise RequestError(
            f"max_sequence_length = {job.max_sequence_length}: {pipeline.name} in SGLang always pads to "
            f"{pipeline.sequence_length}; use that (model.max_sequence_length)"
        )


def wanted_steps(job: Resolved) -> tuple[int, ...]:
    """Latents that the request wants back."""
    return job.return_steps if job.request.rollout and job.request.rollout_return_dit_trajectory else ()


def kept_steps(job: Resolved) -> tuple[int, ...]:
    """Latents that the server is asked for: those, and the first, which proves the seed."""
    return tuple(sorted({0, *wanted_steps(job)}))


def body_of(job: Resolved, row: int, *, conditioning: bool) -> dict[str, Any]:
    """Of `row`, one sample a request: with more, SGLang's step noise depends on how many. conditioning: say it, too.

    What asks for plain sampling is asked for as a rollout of deterministic steps, which has the same bits and says its grid.
    """
    request, stochastic = job.request, bool(job.sde_steps)
    body: dict[str, Any] = {
        "prompt": job.prompts[row],
        "negative_prompt": job.negative_prompt if job.guided else None,
        "seed": job.seeds[row],
        "width": job.geometry.width,
        "height": job.geometry.height,
        "num_inference_steps": job.num_steps,
        "num_outputs_per_prompt": 1,
        "guidance_scale": job.guidance_scale if job.guided else 1.0,
        "rollout": True,
        "rollout_sde_type": request.rollout_sde_type if stochastic else "ode",
        "rollout_noise_level": request.rollout_noise_level if stochastic else 0.7,
        "rollout_log_prob_no_const": request.rollout_log_prob_no_const if stochastic else True,
        "rollout_debug_mode": False,
        "rollout_return_denoising_env": conditioning,
        "rollout_return_dit_trajectory": True,
        "rollout_sde_step_indices": list(job.sde_steps) if stochastic else None,
        "rollout_return_step_indices": list(kept_steps(job)),
        "suppress_logs": True,
    }
    if job.request.generator_device is not None:
        body["generator_device"] = job.request.generator_device
    if request.sigma_shift is not None:
        body["extra_sampling_params"] = {"flow_shift": request.sigma_shift}
    return {name: value for name, value in body.items() if value is not None}
