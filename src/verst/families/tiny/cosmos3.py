"""Small random Cosmos 3 checkpoints: video with sound, video alone, and images with Euler's scheduler."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLWan,
    Cosmos3AVAEAudioTokenizer,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import nn

from verst.families.tiny.qwen_text import qwen_tokenizer
from verst.families.tiny.spec import Tiny

_PROMPTS = ("a red cat on a table", "two big dogs running in the street at night")
_CHANNELS = 8
_SOUND_CHANNELS = 8


def tiny_cosmos3(*, sound: bool, euler: bool = False) -> Cosmos3OmniPipeline:
    """About 0.2 M random parameters; media in multiples of 16 pixels and 1 + 4 k frames."""
    tokenizer = qwen_tokenizer(
        "You are a helpful assistant who will generate images and videos from a give prompt.",
        "The video is not of seconds long and of FPS. This image is of resolution.",
        *_PROMPTS,
    )
    transformer: Any = Cosmos3OmniTransformer(
        head_dim=16,
        hidden_size=32,
        intermediate_size=48,
        latent_channel=_CHANNELS,
        latent_patch_size=2,
        patch_latent_dim=4 * _CHANNELS,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_key_value_heads=1,
        vocab_size=len(tokenizer),
        sound_gen=sound,
        sound_dim=_SOUND_CHANNELS if sound else None,
        sound_latent_fps=25.0,
        rope_scaling={"mrope_section": [2, 3, 3], "mrope_interleaved": True},
        dtype="float32",
    )
    if sound:
        nn.init.normal_(transformer.audio_modality_embed)  # zero as constructed
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    if not euler:
        scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=10.0)
    return Cosmos3OmniPipeline(
        transformer=transformer,
        text_tokenizer=tokenizer,
        vae=_autoencoder(),
        scheduler=scheduler,
        sound_tokenizer=_sound_tokenizer() if sound else None,
        enable_safety_checker=False,
    )


def _autoencoder() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=_CHANNELS,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1] * _CHANNELS,
        latents_std=[1.5] * _CHANNELS,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )


def _sound_tokenizer() -> Cosmos3AVAEAudioTokenizer:
    return Cosmos3AVAEAudioTokenizer(
        sampling_rate=48000,
        vocoder_input_dim=_SOUND_CHANNELS,
        dec_dim=4,
        dec_c_mults=(1, 2, 2, 2, 2),
        dec_strides=(2, 4, 5, 6, 8),
        encoder_enabled=False,
    )


def _spec(*, sound: bool) -> Tiny:
    request: dict[str, Any] = {
        "height": 48, "width": 32, "num_frames": 5, "fps": 24.0, "num_inference_steps": 4, "guidance_scale": 4.0,
    }  # fmt: skip
    return Tiny(
        build=lambda: tiny_cosmos3(sound=sound),
        request=request,
        call={**request, "enable_sound": sound},
        prompts=_PROMPTS,
        euler=False,
    )


_IMAGE: dict[str, Any] = {"height": 64, "width": 48, "num_frames": 1, "num_inference_steps": 4, "guidance_scale": 4.0}

TINY: dict[str, Tiny] = {
    "cosmos3": _spec(sound=True),
    "cosmos3-video": _spec(sound=False),
    "cosmos3-image": Tiny(
        build=lambda: tiny_cosmos3(sound=False, euler=True), request=_IMAGE, call=_IMAGE, prompts=_PROMPTS
    ),
}
