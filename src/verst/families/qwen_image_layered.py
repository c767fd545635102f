"""Qwen-Image-Layered: a picture taken apart into layers, in diffusers' QwenImageLayeredPipeline layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verst.errors import RequestError
from verst.families.base import Components, SamplingDefaults
from verst.families.dynamic_shift import euler_schedule
from verst.families.latent_stats import denormalised, normalised
from verst.families.patches import pack_frames, token_grid, unpack_frames
from verst.families.qwen_image import QwenImage, text_modules, vae_factor
from verst.families.qwen_image_edit import encode_picture, resized, scaled_size
from verst.families.sizes import check_pixels
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Geometry, Latents

_AREA = 640 * 640
_NUM_LAYERS = 4
_BASE_TOKENS = 256 * 256 / 16 / 16


class QwenImageLayered(QwenImage):
    """`num_frames` is the number of layers. Each is two frames of media: its colours, then its opacity as grey.

    The prompt describes the picture; diffusers' pipeline would have an empty one written by the text encoder, which
    does not happen here. The latent is [layers + 1, C, H, W]: its first is the whole picture again, and is not decoded.
    """

    name: str = "qwen_image_layered"
    num_images: int = 1
    own_guidance: str = "u + g (c - u), in two passes always"
    keeps_norm: bool = False

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        return SamplingDefaults(
            geometry=Geometry(height=640, width=640, num_frames=_NUM_LAYERS),
            num_steps=50,
            guidance_scale=4.0,
            negative_prompt=" ",
            max_sequence_length=512,
        )

    def geometry_of(self, components: Components, images: Sequence[Tensor]) -> Geometry:
        """About 640x640 pixels in the picture's proportions."""
        width, height = scaled_size(images[0], _AREA)
        multiple = 2 * vae_factor(components)
        return Geometry(
            height=height // multiple * multiple, width=width // multiple * multiple, num_frames=_NUM_LAYERS
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        check_pixels(geometry, multiple=2 * vae_factor(components))
        if geometry.num_frames < 1:
            raise RequestError(f"num_frames = {geometry.num_frames}: there must be one layer at least")

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        return {"visual": (geometry.num_frames + 1, *super().latent_shapes(components, geometry)["visual"])}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        """mu follows from the tokens of the source picture, which is as large as one layer."""
        *_, height, width = self.latent_shapes(components, geometry)["visual"]
        mu = ((height // 2) * (width // 2) / _BASE_TOKENS) ** 0.5
        sigmas = np.linspace(1.0, 0, num_steps + 1)[:-1]
        return {"visual": euler_schedule(components.modules["scheduler"].config, sigmas, mu=mu, shift=shift)}

    def _frames(self, x: Tensor) -> Tensor:
        return x

    def _more_arguments(self, x: Tensor) -> dict[str, Any]:
        return {"additional_t_cond": torch.zeros(len(x), dtype=torch.long, device=x.device)}

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        """uint8 [B, 2 L, H, W, 3], colours and opacity of each layer, from the bottom up."""
        vae = components.modules["vae"]
        layers = media.to(components.device).permute(0, 1, 4, 2, 3).float() / 255
        rgba = torch.cat([layers[:, 0::2], layers[:, 1::2, :1]], dim=2)
        pixels = torch.cat([_flattened(rgba).unsqueeze(1), rgba], dim=1).to(vae.dtype) * 2 - 1
        x0 = vae.encode(pixels.flatten(0, 1).unsqueeze(2)).latent_dist.mode()
        return {"visual": normalised(x0, vae).squeeze(2).unflatten(0, pixels.shape[:2]).float()}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        """[B, 2 L, 3, H, W]: colours and opacity of each layer, from the bottom up."""
        vae, layers = components.modules["vae"], latents["visual"][:, 1:]
        x0 = denormalised(layers.flatten(0, 1).unsqueeze(2).to(vae.dtype), vae)
        rgba = (vae.decode(x0, return_dict=False)[0].squeeze(2) / 2 + 0.5).clamp(0, 1).float()
        frames = torch.stack([rgba[:, :3], rgba[:, 3:].expand_as(rgba[:, :3])], dim=1)
        return frames.flatten(0, 1).unflatten(0, (len(layers), -1))

    def encode_images(self, components: Components, images: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """`image_latents_0` [1, 1, C, H, W]. Raises RequestError for a picture of other proportions than the geometry."""
        image = images[0]
        wanted = geometry.width * image.shape[0] / image.shape[1]
        if abs(geometry.height - wanted) > 2 * vae_factor(components) + 32:
            raise RequestError(
                f"height = {geometry.height}, width = {geometry.width} would distort a picture of {image.shape[0]} by "
                f"{image.shape[1]} pixels: give neither, or a height near {round(wanted)} for that width"
            )
        picture = resized(image, geometry.width, geometry.height, mode="RGBA")
        return {"image_latents_0": encode_picture(components, picture)}

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return {"visual": pack_frames(latents["visual"])}

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        """[B, S, 4 C] -> [B, layers + 1, C, H, W]."""
        tokens, num_frames = latents["visual"], geometry.num_frames + 1
        height, width = token_grid(tokens.shape[1] // num_frames, geometry)
        return {"visual": unpack_frames(tokens, num_frames, 2 * height, 2 * width)}

    def pipeline(self, components: Components) -> Any:
        from diffusers import QwenImageLayeredPipeline

        return QwenImageLayeredPipeline(
            scheduler=None, vae=None, transformer=None, processor=None, **text_modules(self, components)
        )


def _flattened(layers: Tensor) -> Tensor:
    """Layers [B, L, 4, H, W] in [0, 1] laid over one another, the first at the bottom: [B, 4, H, W]."""
    color, alpha = layers[:, 0, :3], layers[:, 0, 3:]
    for layer in layers[:, 1:].unbind(1):
        top, cover = layer[:, :3], layer[:, 3:]
        total = cover + alpha * (1 - cover)
        color = (top * cover + color * alpha * (1 - cover)) / total.clamp_min(1e-6)
        alpha = total
    return torch.cat([color, alpha], dim=1)
