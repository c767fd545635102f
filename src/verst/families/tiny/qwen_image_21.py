"""A small random Qwen-Image 2.1."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLQwenImage21, QwenImage21Pipeline, QwenImage21Transformer2DModel
from torch import Tensor
from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from verst.families.tiny.qwen_image import PROMPTS, qwen_scheduler
from verst.families.tiny.qwen_text import qwen3_vl, qwen_tokenizer
from verst.families.tiny.spec import Tiny

_WIDTH = 32
_CHANNELS = 8
_SYSTEM = "Comprehend and analyze the provided prompt."


def tiny_qwen_image_21() -> QwenImage21Pipeline:
    """About 0.1 M random parameters; images in multiples of 32 pixels."""
    tokenizer = qwen_tokenizer(_SYSTEM, "<image1> <image2>", *PROMPTS)
    size = {"shortest_edge": 32 * 32, "longest_edge": 2048 * 2048}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            size=size, patch_size=16, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=size, patch_size=16, merge_size=2),
        chat_template=tokenizer.chat_template,
    )
    return QwenImage21Pipeline(
        scheduler=qwen_scheduler(),
        vae=AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=_CHANNELS,
            dim_mult=[1, 1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True, True],
            latents_mean=[0.1 * (-1) ** i for i in range(_CHANNELS)],
            latents_std=[1.5 - 0.1 * i for i in range(_CHANNELS)],
        ),
        text_encoder=Qwen3VLForConditionalGeneration(qwen3_vl(tokenizer, num_layers=2, width=_WIDTH).config).eval(),
        processor=processor,
        transformer=QwenImage21Transformer2DModel(
            in_channels=_CHANNELS,
            out_channels=_CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=_WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _on_white(media: Tensor) -> Tensor:
    """[F, H, W, 4] -> [F, H, W, 3]."""
    colours, opacity = media[..., :3], media[..., 3:]
    return colours * opacity + (1 - opacity)


_SIZE: dict[str, Any] = {"height": 64, "width": 96, "num_inference_steps": 4}

TINY: dict[str, Tiny] = {
    "qwen-image-2.1": Tiny(
        build=tiny_qwen_image_21,
        request={**_SIZE, "guidance_scale": 4.0, "max_sequence_length": 64},
        call={**_SIZE, "true_cfg_scale": 4.0},
        prompts=PROMPTS,
        as_frames=_on_white,
    )
}
