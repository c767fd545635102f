"""The response records of one request, field for field as SGLang-Diffusion names them, and our additions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verst.engine.resolve import Resolved
from verst.families.base import to_uint8
from verst.flow.hooks import RolloutResult
from verst.types import Conditioning, StreamTrajectory

_DEBUG_NAMES = {
    "noise": "rollout_variance_noises",
    "mean": "rollout_prev_sample_means",
    "std": "rollout_noise_std_devs",
    "model_output": "rollout_model_outputs",
}


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What the autoencoders made of one request's rows."""

    pixels: Tensor
    """fp32 [B, F, 3, H, W] in [0, 1]."""
    audio: Tensor | None = None
    """fp32 [B, channels, n] in [-1, 1]; None from a family without sound."""
    sample_rate: int | None = None
    """Audio samples a second."""

    def not_finite(self) -> list[str]:
        parts = {"decoded pixels": self.pixels, "decoded audio": self.audio}
        return [name for name, x in parts.items() if x is not None and not x.isfinite().all()]


def sample_records(
    job: Resolved,
    *,
    streams: Sequence[str],
    rollout: RolloutResult,
    decoded: Decoded | None,
    facts: dict[str, Any],
    seconds: float,
    request_id: str,
    peak_memory_mb: float | None,
) -> list[dict[str, Any]]:
    """One record a sample, with all streams: the first in the contract's fields, the others in `extra_streams`.

    Large tensors stay on the engine's device: who encodes the records brings them over, once.

    rollout: empty for plain sampling. decoded: None where the request wants no media.

    seconds: that it all took, without waiting.
    """
    request = job.request
    echo = {**job.echo(), **facts}
    first, *others = streams if rollout.trajectories else streams[:1]
    media = _media(job, decoded)
    initial_seeds = request.initial_seeds or job.seeds
    records = []
    for row, (prompt, seed) in enumerate(zip(job.prompts, job.seeds, strict=True)):
        paths = {name: samples[row] for name, samples in rollout.trajectories.items()}
        parts = {
            name: {
                "log_probs": path.log_probs,
                "trajectory": _trajectory(path) if request.rollout_return_dit_trajectory else None,
                "debug_tensors": _debug(rollout.debug[name], row) if request.rollout_debug_mode else None,
            }
            for name, path in paths.items()
        }
        head = parts.get(first, dict.fromkeys(("log_probs", "trajectory", "debug_tensors")))
        records.append(
            {
                "request_id": request_id,
                "prompt": prompt,
                "seed": seed,
                "initial_seed": initial_seeds[row],
                **media[row],
                "fps": job.geometry.fps,
                "stream": first,
                "rollout_log_probs": head["log_probs"],
                "rollout_debug_tensors": head["debug_tensors"],
                "denoising_env": _environment(job, rollout.conditioning, row),
                "dit_trajectory": head["trajectory"],
                "extra_streams": {name: _extra_stream(parts[name]) for name in others},
                "inference_time_s": seconds,
                "peak_memory_mb": None if request.suppress_logs else peak_memory_mb,
                "echo": echo,
                "weight_version": facts["weight_version"],
            }
        )
    return records


def _media(job: Resolved, decoded: Decoded | None) -> list[dict[str, Any]]:
    """For each sample its fields of picture and sound, in the form that the request asks for."""
    count = len(job.seeds)
    if decoded is None:
        return [dict.fromkeys(("generated_output", "media", "audio", "sample_rate"))] * count
    pixels, audio = decoded.pixels, decoded.audio
    media = to_uint8(pixels) if job.request.media_format == "uint8" else None
    return [
        {
            "generated_output": _channels_first(pixels[row]) if media is None else None,
            "media": None if media is None else media[row],
            "audio": None if audio is None else audio[row],
            "sample_rate": decoded.sample_rate,
        }
        for row in range(count)
    ]


def _channels_first(pixels: Tensor) -> Tensor:
    """[F, 3, H, W] -> [3, H, W] for an image, [3, F, H, W] for a video."""
    return pixels[0] if len(pixels) == 1 else pixels.transpose(0, 1)


def _trajectory(path: StreamTrajectory) -> dict[str, Tensor]:
    """`timesteps` are those of the kept latents, as in the contract; `grid_timesteps` are all."""
    return {
        "latents": path.latents,
        "latent_step_indices": path.latent_step_indices,
        "timesteps": path.timesteps[path.latent_step_indices],
        "grid_timesteps": path.timesteps,
        "sigmas": path.sigmas,
    }


def _extra_stream(part: dict[str, Any]) -> dict[str, Any]:
    """A further stream: `log_probs` [T], `debug_tensors`, and where asked for its trajectory's fields beside them."""
    return {"log_probs": part["log_probs"], "debug_tensors": part["debug_tensors"], **(part["trajectory"] or {})}


def _debug(tensors: dict[str, dict[int, Tensor]], row: int) -> dict[str, Tensor]:
    """name -> [S, ...] over the S stochastic steps, whose indices are `rollout_debug_step_indices` [S]."""
    if not tensors:
        return {"rollout_debug_step_indices": torch.zeros(0, dtype=torch.int64)}
    steps = sorted(tensors["mean"])
    out = {"rollout_debug_step_indices": torch.tensor(steps, dtype=torch.int64)}
    for name, values in tensors.items():
        stacked = torch.stack([values[step][row] for step in steps])
        out[_DEBUG_NAMES[name]] = stacked.flatten(1) if name == "std" else stacked
    return out


def _environment(job: Resolved, conditioning: Conditioning | None, row: int) -> dict[str, Any] | None:
    """What the transformer was told; with `share_denoising_env` all unlike rows, batched, with the first sample."""
    shared = job.request.share_denoising_env
    if conditioning is None or (shared and row > 0):
        return None
    # Rows of one prompt are equal, since it was encoded once: one of them says it all.
    alike = shared and len(set(job.prompts)) == 1
    part: slice | int = slice(1 if alike else None) if shared else row
    negative = conditioning.negative
    return {
        "image_kwargs": dataclasses.asdict(job.geometry),
        "pos_cond_kwargs": {name: t[part] for name, t in conditioning.positive.items()},
        "neg_cond_kwargs": None if negative is None else {name: t[part] for name, t in negative.items()},
        "guidance": None,
    }
