"""A small random Z-Image."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import nn

from verst.families.tiny.qwen_text import qwen3, qwen_tokenizer
from verst.families.tiny.spec import Tiny

_PROMPTS = ("a red cat on a table", "two big dogs running in the street at night")


def tiny_z_image() -> ZImagePipeline:
    """About 0.4 M random parameters, most of them in the time embedding; images in multiples of 16 pixels."""
    tokenizer = qwen_tokenizer(*_PROMPTS)
    width = 16
    transformer: Any = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=width,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
    )
    for parameter in (transformer.x_pad_token, transformer.cap_pad_token):  # zero as constructed
        nn.init.normal_(parameter)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 16, 16),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            mid_block_add_attention=False,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=0.3611,
            shift_factor=0.1159,
        ),
        text_encoder=qwen3(tokenizer, num_layers=3, width=width),
        tokenizer=tokenizer,
        transformer=transformer,
    )


_REQUEST: dict[str, Any] = {
    "height": 64,
    "width": 48,
    "num_inference_steps": 4,
    "guidance_scale": 4.0,
    "max_sequence_length": 48,
}

_BOUND = 4e-6
"""Guidance multiplies the rounding of the two sides."""

TINY: dict[str, Tiny] = {
    "z-image": Tiny(build=tiny_z_image, request=_REQUEST, call=_REQUEST, prompts=_PROMPTS, batch_bound=_BOUND)
}
