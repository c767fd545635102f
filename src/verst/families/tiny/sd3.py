"""Small models in the layout of Stable Diffusion 3: random ones for tests, and the glyph model of the demo."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)

from verst.families.tiny.spec import Tiny
from verst.families.tiny.tokenizers import BYTES, clip_tokenizer, t5_tokenizer

GLYPH_MAX_SEQUENCE_LENGTH = 8
"""Tokens of each encoder of the glyph model: begin, four digits, end, padding. Always pass it when sampling."""
_EMBEDDING_STD = 0.5
"""transformers starts embeddings at 0.02, so small that prompts hardly differ and a small model never reads them."""


@dataclass(frozen=True, kw_only=True)
class GlyphSize:
    """Width and depth of the glyph transformer."""

    num_heads: int
    head_dim: int
    num_layers: int


GLYPH_SIZES: dict[str, GlyphSize] = {
    "small": GlyphSize(num_heads=4, head_dim=24, num_layers=4),
    "big": GlyphSize(num_heads=4, head_dim=32, num_layers=6),
}


def tiny_sd3(*, dual_attention: bool) -> StableDiffusion3Pipeline:
    """About 0.2 M random parameters; images up to 256 pixels in multiples of 16.

    `dual_attention` gives SD3.5-medium's form: a second self-attention in the first block, and query-key norms.
    """
    tokenizer = clip_tokenizer(BYTES, max_length=77)
    width = 16  # The two CLIP widths side by side must fit into T5's.
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=2 * width,
            caption_projection_dim=32,
            pooled_projection_dim=2 * width,
            pos_embed_max_size=16,
            dual_attention_layers=(0,) if dual_attention else (),
            qk_norm="rms_norm" if dual_attention else None,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_autoencoder((8, 8, 16, 16), norm_groups=4, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=_clip(tokenizer, width=width, num_layers=2, num_heads=2),
        tokenizer=tokenizer,
        text_encoder_2=_clip(tokenizer, width=width, num_layers=2, num_heads=2),
        tokenizer_2=clip_tokenizer(BYTES, max_length=77),
        text_encoder_3=_t5(width=2 * width, num_layers=1, num_heads=4, feed_forward=32),
        tokenizer_3=t5_tokenizer(max_length=128),
    )


def glyphs_sd3(size: GlyphSize) -> StableDiffusion3Pipeline:
    """The glyph model, untrained: short strings of digits and letters as images of 32x64 pixels."""
    characters = string.digits + string.ascii_lowercase
    length = GLYPH_MAX_SEQUENCE_LENGTH
    tokenizer = clip_tokenizer(characters, max_length=length)
    width = 64
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=size.num_layers,
            attention_head_dim=size.head_dim,
            num_attention_heads=size.num_heads,
            joint_attention_dim=2 * width,
            caption_projection_dim=size.num_heads * size.head_dim,
            pooled_projection_dim=2 * width,
            pos_embed_max_size=16,
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=_autoencoder((16, 32, 64), norm_groups=8, scaling_factor=1.0, shift_factor=0.0),
        text_encoder=_clip(tokenizer, width=width, num_layers=2, num_heads=2),
        tokenizer=tokenizer,
        text_encoder_2=_clip(tokenizer, width=width, num_layers=2, num_heads=2),
        tokenizer_2=clip_tokenizer(characters, max_length=length),
        text_encoder_3=_t5(width=2 * width, num_layers=1, num_heads=4, feed_forward=64),
        tokenizer_3=t5_tokenizer(max_length=length),
    )


def _clip(tokenizer: CLIPTokenizer, *, width: int, num_layers: int, num_heads: int) -> CLIPTextModelWithProjection:
    model = CLIPTextModelWithProjection(
        CLIPTextConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            vocab_size=len(tokenizer),
            max_position_embeddings=tokenizer.model_max_length,
            hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    _widen_embeddings(model, _EMBEDDING_STD)
    return model


def _t5(*, width: int, num_layers: int, num_heads: int, feed_forward: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=384,
            d_model=width,
            d_kv=width // num_heads,
            d_ff=feed_forward,
            num_layers=num_layers,
            num_heads=num_heads,
            dropout_rate=0.0,
        )
    )


def _autoencoder(
    channels: Sequence[int], *, norm_groups: int, scaling_factor: float, shift_factor: float
) -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=tuple(channels),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=norm_groups,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
    )


def _widen_embeddings(model: nn.Module, std: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)


_SIZE = {"height": 64, "width": 64, "num_inference_steps": 4, "guidance_scale": 4.0, "max_sequence_length": 64}


def _spec(*, dual_attention: bool) -> Tiny:
    return Tiny(build=lambda: tiny_sd3(dual_attention=dual_attention), request=_SIZE, call=_SIZE)


TINY: dict[str, Tiny] = {"sd3": _spec(dual_attention=False), "sd3.5": _spec(dual_attention=True)}
"""Name of a tiny checkpoint -> how it is made and used."""

__all__ = ["GLYPH_MAX_SEQUENCE_LENGTH", "GLYPH_SIZES", "TINY", "GlyphSize", "glyphs_sd3", "tiny_sd3"]
