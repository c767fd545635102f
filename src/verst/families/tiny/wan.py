"""Small random models in the layouts of Wan 2.1 and 2.2."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import UMT5Config, UMT5EncoderModel

from verst.families.tiny.spec import Tiny
from verst.families.tiny.tokenizers import t5_tokenizer

_WIDTH = 32
"""Of the text encoder."""


def tiny_wan(*, experts: int = 1, boundary_ratio: float | None = None) -> WanPipeline:
    """Clips in multiples of 16 pixels; with `experts` = 2 and a boundary Wan 2.2 A14B's form."""
    return WanPipeline(
        **_text(),
        vae=_autoencoder(4),
        scheduler=_scheduler(flow_shift=3.0),
        transformer=_transformer(4, 4),
        transformer_2=_transformer(4, 4) if experts == 2 else None,
        boundary_ratio=boundary_ratio,
    )


def tiny_wan_5b() -> WanPipeline:
    """Wan 2.2 TI2V-5B's form: a timestep for each token, an autoencoder of 16 pixels a side."""
    vae = _autoencoder(
        8, is_residual=True, in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16, decoder_base_dim=8
    )
    return WanPipeline(
        **_text(),
        vae=vae,
        scheduler=_scheduler(flow_shift=5.0),
        transformer=_transformer(8, 8),
        expand_timesteps=True,
    )


def tiny_wan_i2v() -> WanImageToVideoPipeline:
    """Wan 2.2 I2V-A14B's form: noisy latent, mask of 4 frames and first frame's latent side by side."""
    return WanImageToVideoPipeline(
        **_text(),
        vae=_autoencoder(4),
        scheduler=_scheduler(flow_shift=5.0),
        transformer=_transformer(12, 4),
        transformer_2=_transformer(12, 4),
        boundary_ratio=0.9,
        image_encoder=None,
        image_processor=None,
    )


def _text() -> dict[str, Any]:
    encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=384, d_model=_WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )
    )  # fmt: skip
    return {"tokenizer": t5_tokenizer(max_length=512), "text_encoder": encoder}


def _transformer(in_channels: int, out_channels: int) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=in_channels, out_channels=out_channels,
        text_dim=_WIDTH, freq_dim=32, ffn_dim=48, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip


def _autoencoder(channels: int, **options: Any) -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=8, z_dim=channels, dim_mult=[1, 1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.1] * channels, latents_std=[1.5] * channels, **options,
    )  # fmt: skip


def _scheduler(*, flow_shift: float) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)


_SIZE: dict[str, Any] = {
    "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4, "guidance_scale": 4.0,
    "max_sequence_length": 48,
}  # fmt: skip
"""Of request and call; four steps are on both sides of either boundary."""

_BOUND = 4e-6
"""Guidance 4 multiplies the rounding of the two passes."""

TINY: dict[str, Tiny] = {
    "wan2.1": Tiny(build=tiny_wan, request=_SIZE, call=_SIZE, euler=False, batch_bound=_BOUND),
    "wan2.2-a14b": Tiny(
        build=lambda: tiny_wan(experts=2, boundary_ratio=0.875),
        request=_SIZE,
        call=_SIZE,
        euler=False,
        batch_bound=_BOUND,
    ),
    "wan2.2-i2v-a14b": Tiny(
        build=tiny_wan_i2v, request=_SIZE, call=_SIZE, num_images=1, euler=False, batch_bound=_BOUND
    ),
    "wan2.2-ti2v-5b": Tiny(build=tiny_wan_5b, request=_SIZE, call=_SIZE, euler=False, batch_bound=_BOUND),
}
"""Name of a tiny checkpoint -> how it is made and used."""
