"""Qwen-Image-Edit (one source picture) and Edit-Plus (one or more): QwenImageEditPipeline, QwenImageEditPlusPipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from verst.errors import RequestError
from verst.families.base import SOME_IMAGES, Components, Part
from verst.families.qwen_image import QwenImage, prompt_row, text_modules, vae_factor
from verst.types import Geometry, join_rows


class QwenImageEdit(QwenImage):
    """The text encoder and the transformer both see the picture, scaled to the same area."""

    name: str = "qwen_image_edit"
    num_images: int = 1
    parts: dict[Part, tuple[str, ...]] = {  # noqa: RUF012
        **QwenImage.parts,
        "text": ("text_encoder", "tokenizer", "processor"),
    }
    area: int = 1024 * 1024
    """Pixels of a picture as the transformer sees it, whatever size it came in, and of what is made by default."""
    prompt_area: int = 1024 * 1024
    """Pixels of a picture as the text encoder gets it; its processor may scale it further."""

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        """None is too long: these pipelines crop no prompt, whatever the length asked for."""
        return []

    def encode_prompts(
        self,
        components: Components,
        prompts: Sequence[str],
        *,
        max_sequence_length: int,
        geometry: Geometry | None = None,
        negative: bool = False,
    ) -> dict[str, Tensor]:
        raise RequestError(f"{self.name} reads its prompts together with condition images, and got none")

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
        del max_sequence_length, geometry, negative
        pictures = [scaled(image, self.prompt_area) for image in images]
        return self._encode(components, prompts, self._as_pipeline_takes(pictures))

    def _encode(self, components: Components, prompts: Sequence[str], pictures: Any) -> dict[str, Tensor]:
        pipeline = self.pipeline(components)
        rows = [pipeline.encode_prompt(prompt, image=pictures, device=components.device) for prompt in prompts]
        return join_rows([prompt_row(*row) for row in rows])

    def _as_pipeline_takes(self, pictures: list[Image.Image]) -> Any:
        return pictures[0]

    def geometry_of(self, components: Components, images: Sequence[Tensor]) -> Geometry:
        """About `area` pixels in the proportions of the last picture."""
        width, height = scaled_size(images[-1], self.area)
        multiple = 2 * vae_factor(components)
        return Geometry(height=height // multiple * multiple, width=width // multiple * multiple)

    def encode_images(self, components: Components, images: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """`image_latents_<i>` [1, 1, C, H, W] of each picture."""
        del geometry
        return {
            f"image_latents_{index}": encode_picture(components, scaled(image, self.area))
            for index, image in enumerate(images)
        }

    def pipeline(self, components: Components) -> Any:
        from diffusers import QwenImageEditPipeline

        return QwenImageEditPipeline(scheduler=None, vae=None, transformer=None, **text_modules(self, components))


class QwenImageEditPlus(QwenImageEdit):
    """Several pictures, each numbered in the prompt, and smaller for the text encoder than for the transformer."""

    name: str = "qwen_image_edit_plus"
    num_images: int = SOME_IMAGES
    prompt_area: int = 384 * 384

    def _as_pipeline_takes(self, pictures: list[Image.Image]) -> Any:
        return pictures

    def pipeline(self, components: Components) -> Any:
        from diffusers import QwenImageEditPlusPipeline

        return QwenImageEditPlusPipeline(scheduler=None, vae=None, transformer=None, **text_modules(self, components))


def scaled_size(image: Tensor, area: int) -> tuple[int, int]:
    """(width, height) of about `area` pixels in the proportions of `image` [H, W, 3], in multiples of 32."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    width, height = calculate_dimensions(area, image.shape[1] / image.shape[0])
    return width, height


def scaled(image: Tensor, area: int) -> Image.Image:
    """uint8 [H, W, 3] -> a picture of about `area` pixels, as the pipelines' image processor scales it."""
    return resized(image, *scaled_size(image, area))


def resized(image: Tensor, width: int, height: int, *, mode: str = "RGB") -> Image.Image:
    return _processor().resize(Image.fromarray(image.numpy()).convert(mode), height, width)


@torch.no_grad()
def encode_picture(components: Components, picture: Image.Image) -> Tensor:
    """Normalised latents [1, 1, C, H, W], fp32."""
    vae = components.modules["vae"]
    pixels = _processor().preprocess(picture, picture.height, picture.width).unsqueeze(2)
    latents = vae.encode(pixels.to(components.device, vae.dtype)).latent_dist.mode()
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    # A division, as in these pipelines: the product with 1 / std has other bits.
    return ((latents - mean) / std).transpose(1, 2).float()


def _processor() -> Any:
    from diffusers.image_processor import VaeImageProcessor

    return VaeImageProcessor()
