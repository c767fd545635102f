"""What a model family is to verst: one small protocol that engine and trainer both call.

`velocity` is the only caller of a transformer. Sigma in [0, 1] is the unit of noise; a family alone turns it into
its model's timestep.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents

Part = Literal["transformer", "text", "autoencoder", "scheduler"]
"""Of a model folder; `text`: encoders and tokenizers."""
ALL_PARTS: tuple[Part, ...] = ("transformer", "text", "autoencoder", "scheduler")
SOME_IMAGES = -1
"""`Family.num_images`: one or more."""
ANY_IMAGES = -2
"""`Family.num_images`: any number, or none."""


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What an engine uses where a request leaves a parameter out: the published pipeline's own values."""

    geometry: Geometry
    num_steps: int
    guidance_scale: float
    negative_prompt: str
    max_sequence_length: int


@dataclass(kw_only=True)
class Components:
    """The loaded parts of a checkpoint; only those that were asked for."""

    folder: Path
    family: Family
    modules: dict[str, Any]
    """diffusers' component name -> module, tokenizer or scheduler."""
    device: torch.device
    dtype: torch.dtype

    @functools.cached_property
    def transformer(self) -> nn.Module:
        """What is trained and what `velocity` takes: the transformer, or a ModuleDict of a family's experts."""
        experts = {name: self.modules[name] for name in ("transformer", "transformer_2") if self.modules.get(name)}
        return nn.ModuleDict(experts) if len(experts) > 1 else self.modules["transformer"]


class Family(Protocol):
    """One adapter per model family."""

    name: str
    streams: tuple[str, ...]
    """Latent streams that are denoised together; a geometry may leave out all but the first, as an image has no sound."""
    lora_targets: tuple[str, ...]
    """Default module name suffixes of a LoRA."""
    fsdp_blocks: tuple[str, ...]
    """Class names of the repeated blocks that FSDP2 shards one by one."""
    fp32_modules: tuple[str, ...]
    """What stays fp32 in a model of half precision: parts of a parameter's dotted name, as diffusers' from_pretrained
    takes them, so names of modules or of parameters. `recognise` adds the recipe's own to the model's."""
    unguided_scale: float
    """The largest guidance_scale that is no guidance, so that the negative prompt is never read: 1 as a rule, 0 where
    the formula is c + g (c - u), infinity in a model without an unconditional side."""
    num_images: int
    """Condition images of a request: 0 none, 1 a first frame or an edit source, SOME_IMAGES or ANY_IMAGES."""

    def load(self, folder: Path, *, parts: Iterable[Part], dtype: torch.dtype, device: torch.device) -> Components:
        """The named parts of a diffusers folder. Raises ModelError."""

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        """One line for each prompt that is longer than an encoder takes; needs the part "text"."""

    def encode_prompts(
        self,
        components: Components,
        prompts: Sequence[str],
        *,
        max_sequence_length: int,
        geometry: Geometry | None = None,
        negative: bool = False,
    ) -> dict[str, Tensor]:
        """Conditioning rows [B, ...] by name, on the components' device; row i is prompt i alone.

        geometry: for a model that is told its size in words. negative: these are negative prompts, which some
        pipelines write another template around.

        Gradients reach the text encoders where their parameters ask for them: never after `load`, only in SFT.
        """

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        """Parameters of a request that names none."""

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        """Raises RequestError, naming the size and the nearest that fits, for one the model cannot make."""

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        """stream -> one sample's latent shape."""

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        """stream -> a scheduler of its own with its grid set."""

    def velocity(
        self,
        transformer: nn.Module,
        latents: Latents,
        sigmas: dict[str, Tensor],
        conditioning: Conditioning,
        *,
        guidance_scale: float,
        dtype: torch.dtype | None = None,
    ) -> Latents:
        """The guided velocity eps - x0 of each stream: [B, ...] fp32. sigmas: stream -> [B] fp32.

        dtype: what the transformer computes in, where its parameters are stored in another (FSDP2 masters).
        """

    def encode_media(self, components: Components, media: Tensor) -> Latents:
        """uint8 [B, F, H, W, 3] -> normalised clean latents x0, fp32 (the mode of the autoencoder's posterior)."""

    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        """Clean latents -> fp32 [B, F, 3, H, W] in [0, 1]."""

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        """Our layout ([B, C, H, W], [B, C, T, H, W], ...) -> the one in which diffusers' pipeline steps the stream."""

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        """The inverse of `pack`."""


@runtime_checkable
class HasSound(Protocol):
    """A family that makes sound."""

    def decode_audio(self, components: Components, latents: Latents) -> tuple[Tensor, int] | None:
        """Clean latents -> (fp32 [B, channels, n] in [-1, 1], samples a second); None where `latents` holds no sound."""


@runtime_checkable
class EncodesSound(Protocol):
    """A family whose autoencoder of sound has an encoder, so that it can be trained on recordings."""

    def sound_format(self, components: Components) -> tuple[int, int]:
        """(samples a second, channels) that `encode_audio` takes. Raises ModelError for a checkpoint without encoder."""

    def encode_audio(self, components: Components, audio: Tensor, geometry: Geometry) -> Latents:
        """fp32 [B, channels, n] in [-1, 1], as long as the geometry's clip -> normalised clean `audio` latents, fp32."""


@runtime_checkable
class TakesImages(Protocol):
    """A family whose `num_images` is not 0."""

    def encode_images(self, components: Components, images: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """Condition images (uint8 [H, W, 3] each) as conditioning rows [1, ...] of both sides."""


@runtime_checkable
class SeesImages(Protocol):
    """A family whose text encoder reads the condition images together with the prompt."""

    def encode_prompts_with_images(
        self,
        components: Components,
        prompts: Sequence[str],
        images: Sequence[Tensor],
        *,
        max_sequence_length: int,
        geometry: Geometry,
        negative: bool = False,
    ) -> dict[str, Tensor]:
        """As `Family.encode_prompts`, where there are images: uint8 [H, W, 3] each, the same for all prompts."""


@runtime_checkable
class FollowsImages(Protocol):
    """A family that takes the size of what it makes from the condition images, where a request names none."""

    def geometry_of(self, components: Components, images: Sequence[Tensor]) -> Geometry:
        """The pipeline's default. images: uint8 [H, W, 3] each."""


@runtime_checkable
class OwnGuidance(Protocol):
    """A family that guides by another formula than u + g (c - u), so that nobody else can combine its two sides."""

    own_guidance: str
    """The formula, in words."""


def without_guidance(family: Family) -> float:
    """The guidance_scale to sample without guidance: 1, or 0 where that is already guided."""
    return min(1.0, family.unguided_scale) if family.unguided_scale >= 0 else 1.0


def to_uint8(pixels: Tensor) -> Tensor:
    """fp32 [B, F, 3, H, W] in [0, 1] -> uint8 [B, F, H, W, 3], with the rounding of diffusers' own numpy_to_pil."""
    return (pixels * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).contiguous()
