"""The request record of `POST /rollout/generate`: SGLang-Diffusion's contract and our optional additions. No torch."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from verst.errors import RequestError

# Strict, since true is no number here.
Seed = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
Count = Annotated[int, Field(gt=0, le=2**14, strict=True)]
Steps = tuple[Annotated[int, Field(ge=0, le=2**14, strict=True)], ...]
Scale = Annotated[float, Field(ge=0.0, strict=True)]
Positive = Annotated[float, Field(gt=0.0, strict=True)]
Text = Annotated[str, Field(max_length=2**16)]
MOST_SAMPLES = 2**12
MOST_PIXELS = 2**32
"""Of all samples of a request: 64 clips of 121 frames of 768 x 704 have fewer. More would end the engine, or its machine."""

_EXTRA_NAMES = {"flow_shift": "sigma_shift"}
"""SGLang's sampling parameter -> our field, where the names differ."""
_SHAPE_FAULTS = ("extra_forbidden", "missing", "json_invalid", "union_tag")


class GenerateRequest(BaseModel):
    """One prompt (or `prompts`), one batch of samples. None: the engine's own default, echoed as resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    prompt: Text | None = None
    """The prompt of all samples; give either this or `prompts`."""
    negative_prompt: Text | None = None
    """Only read with guidance; None = the model's default."""
    seed: Seed | None = None
    """Sample i gets seed + i, unless `seeds` says otherwise."""
    generator_device: Literal["cpu", "cuda"] | None = None
    """Where noise is drawn; None and "cuda" mean the engine's own device."""
    width: Count | None = None
    height: Count | None = None
    num_inference_steps: Count | None = None
    num_outputs_per_prompt: Count | None = None
    """Samples of this request; None = as many as `seeds` or `prompts` has, else 1."""
    guidance_scale: Scale | None = None
    """Classifier-free guidance; at most 1 = off."""
    true_cfg_scale: Scale | None = None
    """Wins over guidance_scale where set."""
    num_frames: Count | None = None
    fps: Positive | None = None
    rollout: bool = True
    """False: plain sampling; only the media come back."""
    rollout_sde_type: Literal["sde", "cps", "dance", "ode"] = "sde"
    """How a stochastic step moves ("dance" is ours)."""
    rollout_noise_level: Scale = 0.7
    """eta of the transition."""
    rollout_log_prob_no_const: bool = False
    """Log-probs are -(x' - mean)^2 only, which a step without noise has as well."""
    rollout_debug_mode: bool = False
    """Return noise, mean, std and model output of the stochastic steps."""
    rollout_return_denoising_env: bool = False
    """Return what the transformer was conditioned on."""
    rollout_return_dit_trajectory: bool = False
    """Return the latents on the way."""
    rollout_sde_step_indices: Steps | None = None
    """Stochastic steps, ascending; None = all, [] = none."""
    rollout_return_step_indices: Steps | None = None
    """Kept latents, ascending; T = the final one; None = all."""
    image_path: list[str] | None = None
    """Condition images, by their paths on the engine's machine, shared by all samples of the request."""
    suppress_logs: bool = False
    extra_sampling_params: dict[str, Any] | None = None
    """Merged over the other parameters; names as here or as SGLang's."""

    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, max_length=MOST_SAMPLES)] | None = None
    """One a sample."""
    initial_seeds: Annotated[tuple[Seed, ...], Field(min_length=1, max_length=MOST_SAMPLES)] | None = None
    """One a sample: the initial latent comes from this seed, step noise from the sample's own."""
    prompts: Annotated[tuple[Text, ...], Field(min_length=1, max_length=MOST_SAMPLES)] | None = None
    """One a sample, for batches of unlike prompts."""
    rollout_storage_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Latents are rounded to this, and the rounded value is fed on and scored."""
    rollout_log_prob_of: Literal["stored", "noise"] = "stored"
    """stored: of the next latent as stored, which a trainer reproduces; noise: of the drawn noise, as SGLang's."""
    rollout_log_prob_reduction: Literal["mean", "sum"] = "mean"
    """Over the elements of a sample's latent."""
    guidance_passes: Literal["one_batch", "two"] = "one_batch"
    """With guidance: both prompts in one batch of twice the rows, or one forward each (half the memory of activations).
    They differ by rounding alone: use the one that the trainer or the engine you compare with uses."""
    rollout_share_prefix: bool = False
    """The samples have one prompt and one initial latent: the steps before the first stochastic one are computed once.
    """
    sigma_shift: Positive | None = None
    """Shift of the sigma grid; None = the checkpoint's own."""
    max_sequence_length: Count | None = None
    """Tokens of the long text encoder."""
    long_prompts: Literal["refuse", "truncate"] = "refuse"
    share_denoising_env: bool = False
    """The conditioning comes once, batched over all samples, with the first sample; as one row where all have one prompt.
    """
    media_format: Literal["float", "uint8"] = "float"
    """float: `generated_output` fp32 [3, H, W] in [0, 1]; uint8: `media` [F, H, W, 3]."""
    return_media: bool = True
    """False: the final latents are not decoded, and neither media nor sound come back; their trajectory must be kept."""
    key: tuple[int, int] | None = None
    """(rollout, group), echoed."""

    @model_validator(mode="after")
    def _agree(self) -> GenerateRequest:
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError("give either prompt or prompts")
        lengths = {
            name: len(value)
            for name in ("seeds", "initial_seeds", "prompts")
            if (value := getattr(self, name)) is not None
        }
        if self.num_outputs_per_prompt is not None:
            lengths["num_outputs_per_prompt"] = self.num_outputs_per_prompt
        if len(set(lengths.values())) > 1:
            raise ValueError(f"numbers of samples disagree: {', '.join(f'{k}: {n}' for k, n in lengths.items())}")
        samples = max(self.num_samples, self.num_outputs_per_prompt or 1)
        if samples > MOST_SAMPLES:
            raise ValueError(f"num_outputs_per_prompt = {samples}: a request makes at most {MOST_SAMPLES}")
        pixels = samples * (self.height or 1) * (self.width or 1) * (self.num_frames or 1)
        if pixels > MOST_PIXELS:
            raise ValueError(
                f"{samples} samples of height x width x num_frames = {self.height} x {self.width} x {self.num_frames} are "
                f"{pixels} pixels, a request makes at most {MOST_PIXELS}"
            )
        if self.seed is not None and self.seeds is not None and self.seeds[0] != self.seed:
            raise ValueError(f"seed = {self.seed} is not seeds[0] = {self.seeds[0]}; leave one out")
        for name in ("rollout_sde_step_indices", "rollout_return_step_indices"):
            steps = getattr(self, name)
            if steps is not None and list(steps) != sorted(set(steps)):
                raise ValueError(f"{name} = {list(steps)} must be ascending without repeats")
        if None not in (self.true_cfg_scale, self.guidance_scale) and self.true_cfg_scale != self.guidance_scale:
            raise ValueError(
                f"guidance_scale = {self.guidance_scale} and true_cfg_scale = {self.true_cfg_scale} differ; leave one out"
            )
        return self

    @property
    def num_samples(self) -> int:
        for many in (self.seeds, self.prompts, self.initial_seeds):
            if many is not None:
                return len(many)
        return self.num_outputs_per_prompt or 1

    def merged(self) -> GenerateRequest:
        """This request with `extra_sampling_params` written over it. Raises RequestError for an unknown one."""
        if not self.extra_sampling_params:
            return self
        values: dict[str, Any] = {}
        for name, value in self.extra_sampling_params.items():
            field = _EXTRA_NAMES.get(name, name)
            if field not in GenerateRequest.model_fields or field in ("rollout", "extra_sampling_params"):
                raise RequestError(f"extra_sampling_params.{name} is no sampling parameter; {_nearest(name)}")
            if field == "seed" and isinstance(value, list):
                field = "seeds"
            values[field] = value
        data = {**self.model_dump(exclude_none=True), **values}
        if "seeds" in values:
            data.pop("seed", None)
        try:
            return GenerateRequest.model_validate(data)
        except ValidationError as error:
            raise RequestError(f"extra_sampling_params: {explain(error)[1]}") from error

    def sample_seeds(self) -> tuple[int, ...]:
        """The seed of each sample. Raises RequestError when none was given or one is past 2^63 - 1."""
        if self.seeds is not None:
            return self.seeds
        if self.seed is None:
            raise RequestError("seed is missing: give seed or seeds, so that the samples can be made again")
        if self.seed + self.num_samples - 1 > 2**63 - 1:
            raise RequestError(f"seed = {self.seed} + {self.num_samples - 1} is past 2^63 - 1")
        return tuple(range(self.seed, self.seed + self.num_samples))


def explain(error: ValidationError) -> tuple[int, str]:
    """(HTTP status, message) of a body that is no request: 422 for its shape, 400 for a value out of range."""
    lines, status = [], 400
    for fault in error.errors():
        name = ".".join(str(part) for part in fault["loc"]) or "body"
        kind = fault["type"]
        if kind in _SHAPE_FAULTS or kind.endswith(("_type", "_parsing", "_from_float")):
            status = 422
        if kind == "extra_forbidden":
            lines.append(f"{name} is no field of the request; {_nearest(name)}")
        elif kind == "value_error":
            lines.append(fault["msg"].removeprefix("Value error, "))
        elif kind in ("missing", "json_invalid"):
            lines.append(f"{name}: {fault['msg']}")
        else:
            lines.append(f"{name} = {fault['input']!r}: {fault['msg']}")
    return status, "; ".join(lines)


def _nearest(name: str) -> str:
    fields = list(GenerateRequest.model_fields)
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"fields are: {', '.join(fields)}"
