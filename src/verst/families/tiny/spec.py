"""What a tiny checkpoint says of itself, so that one set of tests serves every family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

Build = Callable[[], Any]
"""Makes a diffusers pipeline (a class that diffusers leaves untyped) from torch's current random state."""


@dataclass(frozen=True, kw_only=True)
class Tiny:
    build: Build
    request: Mapping[str, Any]
    """Fields of an engine's GenerateRequest, without prompt and seed: a small rollout of this model with guidance on."""
    call: Mapping[str, Any]
    """Arguments of the diffusers pipeline, without prompt and generator, that ask for exactly the same."""
    prompts: tuple[str, str] = ("a red cat on a table", "two big dogs running in the street at night")
    """Of different token lengths."""
    negative_prompt: str = "blurry"
    num_images: int = 0
    """Condition images that request and call need."""
    image_mode: str = "RGB"
    """The form of picture that the pipeline takes, in pillow's words."""
    as_frames: Callable[[Tensor], Tensor] = lambda media: media
    """The pipeline's media of one sample [F, H, W, C] in [0, 1] as verst's frames."""
    euler: bool = True
    """The checkpoint's own scheduler is flow-matching Euler, so that an ODE rollout gives the pipeline's media."""
    batch_bound: float = 1e-6
    """Largest difference of a velocity, relative to its largest value, between a row alone and in a batch of two."""
    load: Callable[[Path], Any] | None = None
    """Loads the folder as a diffusers pipeline, where DiffusionPipeline.from_pretrained does not."""
    data_minus_noise: bool = False
    """What the pipeline hands its scheduler is x0 - eps, not eps - x0."""
    load_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's from_pretrained."""
