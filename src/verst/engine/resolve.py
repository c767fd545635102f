"""From a request to what the engine will really do: defaults filled in, and everything impossible refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from verst.engine.images import ConditionImages, check_number, load_images
from verst.engine.request import GenerateRequest
from verst.errors import PromptError, RequestError
from verst.families import Components, Geometry
from verst.families.base import FollowsImages, OwnGuidance
from verst.flow.controller import RolloutOptions, make_transition


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A request that the engine can carry out; nothing in it is left open."""

    request: GenerateRequest
    """With extra parameters merged in."""
    geometry: Geometry
    prompts: tuple[str, ...]
    """[B]"""
    negative_prompt: str
    seeds: tuple[int, ...]
    """[B]"""
    num_steps: int
    guidance_scale: float
    guided: bool
    """The unconditional side is needed."""
    sde_steps: tuple[int, ...]
    return_steps: tuple[int, ...]
    max_sequence_length: int
    generator_device: Literal["cpu", "cuda"]
    images: ConditionImages
    truncated_prompts: int
    """Distinct prompts that an encoder crops; 0 unless the request allows it."""

    @property
    def storage_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.request.rollout_storage_dtype)
        return dtype

    @property
    def shared_steps(self) -> int:
        """First steps that all samples of the request go together."""
        if not (self.request.rollout and self.request.rollout_share_prefix):
            return 0
        return self.sde_steps[0] if self.sde_steps else self.num_steps

    @property
    def rollout_options(self) -> RolloutOptions | None:
        """What the request asks of its controllers; None for plain sampling."""
        request = self.request
        if not request.rollout:
            return None
        return RolloutOptions(
            transition=make_transition(request.rollout_sde_type, request.rollout_noise_level),
            sde_step_indices=self.sde_steps,
            return_step_indices=self.return_steps if request.rollout_return_dit_trajectory else (),
            storage_dtype=self.storage_dtype,
            log_prob_of=request.rollout_log_prob_of,
            log_prob_no_const=request.rollout_log_prob_no_const,
            log_prob_reduction=request.rollout_log_prob_reduction,
            debug=request.rollout_debug_mode,
            keep_conditioning=request.rollout_return_denoising_env,
        )

    @property
    def join_key(self) -> tuple[Any, ...]:
        """Requests of one key can be rows of one batch."""
        return (
            self.request.rollout,
            self.geometry,
            self.num_steps,
            self.guidance_scale,
            self.request.guidance_passes if self.guided else None,
            self.request.sigma_shift,
            self.request.rollout_storage_dtype,
            self.max_sequence_length,
            self.images.sizes,
        )

    def echo(self) -> dict[str, Any]:
        """Every field of the request as used; what plain sampling does not read is None."""
        echo = self.request.model_dump(mode="json")
        echo |= {
            "negative_prompt": self.negative_prompt,
            "seeds": list(self.seeds),
            "initial_seeds": list(self.request.initial_seeds or self.seeds),
            "prompts": list(self.prompts),
            "generator_device": self.generator_device,
            "height": self.geometry.height,
            "width": self.geometry.width,
            "num_frames": self.geometry.num_frames,
            "fps": self.geometry.fps,
            "num_inference_steps": self.num_steps,
            "num_outputs_per_prompt": len(self.seeds),
            "guidance_scale": self.guidance_scale,
            "max_sequence_length": self.max_sequence_length,
            "rollout_sde_step_indices": list(self.sde_steps),
            "rollout_return_step_indices": list(self.return_steps),
            "truncated_prompts": self.truncated_prompts,
            "images_sha256": self.images.digest or None,
        }
        if not self.request.rollout:
            echo |= {name: None for name in echo if name.startswith("rollout_")}
        return echo


def resolve(request: GenerateRequest, components: Components, *, images: ConditionImages | None = None) -> Resolved:
    """Raises RequestError or PromptError, naming field, value and what would be right.

    images: those of the request's image_path, where they were read already.
    """
    request = request.merged()
    family, defaults = components.family, components.family.sampling_defaults(components)
    check_number(family, len(request.image_path or ()))
    images = load_images(request.image_path) if images is None else images
    default = defaults.geometry
    if images.pixels and isinstance(family, FollowsImages):
        default = family.geometry_of(components, images.pixels)
    geometry = Geometry(
        height=_given(request.height, default.height),
        width=_given(request.width, default.width),
        num_frames=_given(request.num_frames, default.num_frames),
        fps=_given(request.fps, default.fps),
    )
    family.check_geometry(components, geometry)
    guidance = _given(_given(request.true_cfg_scale, request.guidance_scale), defaults.guidance_scale)
    prompts = request.prompts or (request.prompt or "",) * request.num_samples
    negative = _given(request.negative_prompt, defaults.negative_prompt)
    length = _given(request.max_sequence_length, defaults.max_sequence_length)
    num_steps = _given(request.num_inference_steps, defaults.num_steps)
    guided = guidance > family.unguided_scale
    if request.guidance_passes == "two" and (family.unguided_scale != 1 or isinstance(family, OwnGuidance)):
        raise RequestError(f'guidance_passes = "two": {family.name} guides by a formula of its own, use "one_batch"')
    if request.true_cfg_scale is not None and math.isinf(family.unguided_scale):
        raise RequestError(
            f"true_cfg_scale = {request.true_cfg_scale}: {family.name} has no unconditional side; "
            "guidance_scale is the scale that its transformer reads"
        )
    if not request.return_media and not (request.rollout and request.rollout_return_dit_trajectory):
        raise RequestError(
            "return_media = false leaves nothing to return: keep the latents with rollout = true and "
            "rollout_return_dit_trajectory = true"
        )
    if request.rollout_share_prefix:
        _check_prefix(request, prompts)
    return Resolved(
        request=request,
        geometry=geometry,
        prompts=prompts,
        negative_prompt=negative,
        seeds=request.sample_seeds(),
        num_steps=num_steps,
        guidance_scale=guidance,
        guided=guided,
        sde_steps=_sde_steps(request, num_steps),
        return_steps=_return_steps(request, num_steps),
        max_sequence_length=length,
        generator_device="cpu" if request.generator_device == "cpu" or components.device.type == "cpu" else "cuda",
        images=images,
        truncated_prompts=_truncated(
            components, [*prompts, *([negative] if guided else [])], length, request.long_prompts
        ),
    )


def _given(value: Any, default: Any) -> Any:
    """`value or default` would turn 0 into the default."""
    return default if value is None else value


def _truncated(components: Components, prompts: Sequence[str], length: int, policy: str) -> int:
    problems = [
        lines
        for prompt in dict.fromkeys(prompts)
        if (lines := components.family.check_prompts(components, [prompt], max_sequence_length=length))
    ]
    if problems and policy == "refuse":
        raise PromptError(
            "; ".join(line for lines in problems for line in lines)
            + '. Shorten it, raise max_sequence_length where that is the limit, or allow long_prompts = "truncate"'
        )
    return len(problems)


def _check_prefix(request: GenerateRequest, prompts: Sequence[str]) -> None:
    starts = set(request.initial_seeds or request.sample_seeds())
    if len(set(prompts)) > 1 or len(starts) > 1:
        raise RequestError(
            f"rollout_share_prefix: the samples have {len(set(prompts))} prompts and {len(starts)} initial seeds, but one "
            "path needs one of each; give equal initial_seeds, or leave it out"
        )


def _sde_steps(request: GenerateRequest, num_steps: int) -> tuple[int, ...]:
    steps, kind, eta = request.rollout_sde_step_indices, request.rollout_sde_type, request.rollout_noise_level
    if not request.rollout or kind == "ode":
        if request.rollout and steps:
            raise RequestError(
                f'rollout_sde_step_indices = {list(steps)}, but rollout_sde_type = "ode" has no such step'
            )
        return ()
    chosen = tuple(range(num_steps)) if steps is None else steps
    if chosen and chosen[-1] >= num_steps:
        raise RequestError(
            f"rollout_sde_step_indices has {chosen[-1]}, the last of {num_steps} steps is {num_steps - 1}"
        )
    if kind == "cps" and eta > 1:
        raise RequestError(f"rollout_noise_level = {eta}: the cps transition takes 0 to 1")
    if chosen and not request.rollout_log_prob_no_const:
        if eta == 0:
            raise RequestError(
                "rollout_noise_level = 0 leaves no noise and so no log-prob: "
                'use rollout_sde_type = "ode", rollout_sde_step_indices = [], or rollout_log_prob_no_const = true'
            )
        if kind == "cps" and chosen[-1] == num_steps - 1:
            raise RequestError(
                f"rollout_sde_step_indices reaches the last step {num_steps - 1}, which has no noise under cps and so "
                "no log-prob: leave it out, or use rollout_log_prob_no_const = true"
            )
    return chosen


def _return_steps(request: GenerateRequest, num_steps: int) -> tuple[int, ...]:
    steps = request.rollout_return_step_indices
    if steps is None:
        return tuple(range(num_steps + 1))
    if steps and steps[-1] > num_steps:
        raise RequestError(f"rollout_return_step_indices has {steps[-1]}, the final latent is {num_steps}")
    return steps
