"""Small random FLUX.2 models: dev with reference images, klein with guidance."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from verst.families.tiny.flux1 import dynamic_scheduler
from verst.families.tiny.qwen_text import qwen_tokenizer
from verst.families.tiny.spec import Tiny

_PROMPTS = ("a red cat on a table", "two big dogs running in the street at night")
_WIDTH = 16
_DEV_LAYERS, _KLEIN_LAYERS = 31, 28
"""The pipelines read the states after 30 and after 27 layers."""


def tiny_flux2() -> Flux2Pipeline:
    """About 0.1 M random parameters; images in multiples of 16 pixels."""
    tokenizer = qwen_tokenizer(SYSTEM_MESSAGE, *_PROMPTS)
    processor = PixtralProcessor(
        image_processor=PixtralImageProcessor(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14}),
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
        image_token="<|image_pad|>",
        image_break_token="<|vision_pad|>",
        image_end_token="<|vision_end|>",
    )
    return Flux2Pipeline(
        scheduler=dynamic_scheduler(),
        vae=_autoencoder(),
        text_encoder=_mistral(tokenizer),
        tokenizer=processor,
        transformer=_transformer(guidance_embeds=True),
    )


def tiny_flux2_klein(*, is_distilled: bool = False) -> Flux2KleinPipeline:
    """About 0.1 M random parameters; images in multiples of 16 pixels."""
    tokenizer = qwen_tokenizer(*_PROMPTS)
    encoder = Qwen3ForCausalLM(Qwen3Config(**_text_config(tokenizer, num_layers=_KLEIN_LAYERS)))
    return Flux2KleinPipeline(
        scheduler=dynamic_scheduler(),
        vae=_autoencoder(),
        text_encoder=encoder.eval(),
        tokenizer=tokenizer,
        transformer=_transformer(guidance_embeds=False),
        is_distilled=is_distilled,
    )


def _transformer(*, guidance_embeds: bool) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * _WIDTH,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )


def _autoencoder() -> AutoencoderKLFlux2:
    vae: Any = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
        mid_block_add_attention=False,
    )
    torch.nn.init.normal_(vae.bn.running_mean, std=0.2)  # 0 and 1 as made, which would normalise nothing
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)
    return vae


def _mistral(tokenizer: Qwen2Tokenizer) -> Mistral3ForConditionalGeneration:
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "image_size": 28,
        "patch_size": 14,
        "num_channels": 3,
    }
    image_token: Any = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    text = {"model_type": "mistral", **_text_config(tokenizer, num_layers=_DEV_LAYERS)}
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=image_token, spatial_merge_size=2)
    return Mistral3ForConditionalGeneration(config).eval()


def _text_config(tokenizer: Qwen2Tokenizer, *, num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": tokenizer.model_max_length,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


_SIZE: dict[str, Any] = {"height": 64, "width": 48, "num_inference_steps": 4, "guidance_scale": 4.0}


def _spec(build: Any, *, max_sequence_length: int, num_images: int = 0) -> Tiny:
    size = {**_SIZE, "max_sequence_length": max_sequence_length}
    return Tiny(build=build, request=size, call=size, prompts=_PROMPTS, negative_prompt="", num_images=num_images)


TINY: dict[str, Tiny] = {
    "flux2": _spec(tiny_flux2, max_sequence_length=96, num_images=2),
    "flux2-klein": _spec(tiny_flux2_klein, max_sequence_length=48),
}
