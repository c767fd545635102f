"""A small random Krea 2."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from torch import nn

from verst.families.tiny.qwen_text import qwen3_vl, qwen_tokenizer
from verst.families.tiny.spec import Tiny

_PROMPTS = ("a red cat on a table", "two big dogs running in the street at night")
_TEXT_LAYERS = 36
"""The pipeline reads hidden states up to the 35th."""


def tiny_krea2() -> Krea2Pipeline:
    """About 0.5 M random parameters; images in multiples of 16 pixels."""
    template: Any = Krea2Pipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=None)
    tokenizer = qwen_tokenizer(
        template.prompt_template_encode_prefix, template.prompt_template_encode_suffix, *_PROMPTS
    )
    width = 16
    transformer: Any = Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=width,
        num_text_layers=12,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )
    for name, parameter in transformer.named_parameters():
        if "scale_shift_table" in name:  # zero as constructed, and with it much of the time modulation
            nn.init.normal_(parameter, std=0.3)
    return Krea2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=6400,
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.1, 0.2, 0.0],
            latents_std=[1.5, 1.2, 0.9, 1.1],
        ),
        text_encoder=qwen3_vl(tokenizer, num_layers=_TEXT_LAYERS, width=width),
        tokenizer=tokenizer,
        transformer=transformer,
    )


_REQUEST: dict[str, Any] = {
    "height": 64,
    "width": 48,
    "num_inference_steps": 4,
    "guidance_scale": 3.5,
    "max_sequence_length": 32,
}

TINY: dict[str, Tiny] = {"krea2": Tiny(build=tiny_krea2, request=_REQUEST, call=_REQUEST, prompts=_PROMPTS)}
