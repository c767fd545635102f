"""A small random FLUX.1 (dev)."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

from verst.families.tiny.spec import Tiny
from verst.families.tiny.tokenizers import BYTES, clip_tokenizer, t5_tokenizer

_WIDTH = 32


def dynamic_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """As released: the shift grows with the number of tokens."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
        shift=3.0,
    )


def tiny_flux1(*, guidance_embeds: bool = True) -> FluxPipeline:
    """About 0.2 M random parameters; images in multiples of 16 pixels. Without `guidance_embeds` it is a schnell."""
    tokenizer = clip_tokenizer(BYTES, max_length=77)
    return FluxPipeline(
        scheduler=dynamic_scheduler(),
        vae=_autoencoder(),
        text_encoder=_clip(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=_t5(),
        tokenizer_2=t5_tokenizer(max_length=128),
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=_WIDTH,
            pooled_projection_dim=_WIDTH,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 2, 2),
        ),
    )


def _clip(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    model = CLIPTextModel(
        CLIPTextConfig(
            hidden_size=_WIDTH,
            intermediate_size=2 * _WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=len(tokenizer),
            max_position_embeddings=tokenizer.model_max_length,
            hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    for module in model.modules():
        if isinstance(module, nn.Embedding):  # 0.02 as made, and prompts would hardly differ
            nn.init.normal_(module.weight, std=0.5)
    return model


def _t5() -> T5EncoderModel:
    config = T5Config(vocab_size=384, d_model=_WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.0)
    return T5EncoderModel(config)


def _autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )


_REQUEST: dict[str, Any] = {
    "height": 64,
    "width": 48,
    "num_inference_steps": 4,
    "guidance_scale": 3.5,
    "max_sequence_length": 64,
}

TINY: dict[str, Tiny] = {"flux1": Tiny(build=tiny_flux1, request=_REQUEST, call=_REQUEST)}
