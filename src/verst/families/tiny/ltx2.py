"""Small random models in the layouts of LTX-2 and LTX-2.3."""

from __future__ import annotations

import string
from typing import Any

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder, LTX2VocoderWithBWE
from torch import nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GemmaTokenizer

from verst.families.tiny.spec import Tiny

_TEXT_WIDTH, _TEXT_LAYERS = 16, 2
_VIDEO_WIDTH, _AUDIO_WIDTH = 32, 16
_NUM_HEADS = 2


def tiny_ltx2(*, version: str) -> LTX2Pipeline:
    """Clips with sound, in multiples of 32 pixels; `version` "2.0" or "2.3".

    2.3 has gated attention, prompts modulated by the noise level, a projection of the text for each stream, and a
    vocoder with a second stage.
    """
    later = version == "2.3"
    tokenizer = _tokenizer()
    return LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024,
            max_image_seq_len=4096, shift_terminal=0.1,
        ),
        vae=_autoencoder(),
        audio_vae=AutoencoderKLLTX2Audio(
            base_channels=8, ch_mult=(1, 1, 2), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=16,
            mel_hop_length=160, sample_rate=16000,
        ),
        text_encoder=_gemma(tokenizer),
        tokenizer=tokenizer,
        connectors=_connectors(later=later),
        transformer=_transformer(later=later),
        vocoder=_vocoder(later=later),
    )  # fmt: skip


def _tokenizer() -> GemmaTokenizer:
    """One token a character."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", *string.ascii_letters, *string.digits, *string.punctuation]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return GemmaTokenizer(vocab=vocab, merges=[], model_max_length=1024)


def _gemma(tokenizer: GemmaTokenizer) -> Gemma3ForConditionalGeneration:
    text = {
        "vocab_size": len(tokenizer) + 3, "hidden_size": _TEXT_WIDTH, "intermediate_size": 32,
        "num_hidden_layers": _TEXT_LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 1024, "sliding_window": 64, "initializer_range": 0.2,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=len(tokenizer),
            boi_token_index=len(tokenizer) + 1, eoi_token_index=len(tokenizer) + 2,
        )
    )  # fmt: skip


def _connectors(*, later: bool) -> LTX2TextConnectors:
    widths = {"video": _VIDEO_WIDTH, "audio": _AUDIO_WIDTH} if later else dict.fromkeys(("video", "audio"), _TEXT_WIDTH)
    options: dict[str, Any] = {"per_modality_projections": True, "proj_bias": True} if later else {}
    for name, width in widths.items():
        options |= {
            f"{name}_connector_num_layers": 1,
            f"{name}_connector_num_learnable_registers": 8,
            f"{name}_connector_num_attention_heads": _NUM_HEADS,
            f"{name}_connector_attention_head_dim": width // _NUM_HEADS,
            f"{name}_gated_attn": later,
            f"{name}_hidden_dim": width,
        }
    return LTX2TextConnectors(
        caption_channels=_TEXT_WIDTH, text_proj_in_factor=_TEXT_LAYERS + 1, connector_rope_base_seq_len=64,
        rope_type="split", **options,
    )  # fmt: skip


def _transformer(*, later: bool) -> LTX2VideoTransformer3DModel:
    names = ("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod", "perturbed_attn")
    options = {**dict.fromkeys(names, True), "use_prompt_embeddings": False} if later else {}
    return LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=_NUM_HEADS, attention_head_dim=_VIDEO_WIDTH // _NUM_HEADS,
        cross_attention_dim=_VIDEO_WIDTH, audio_in_channels=8, audio_out_channels=8,
        audio_num_attention_heads=_NUM_HEADS, audio_attention_head_dim=_AUDIO_WIDTH // _NUM_HEADS,
        audio_cross_attention_dim=_AUDIO_WIDTH, num_layers=2, caption_channels=_TEXT_WIDTH, rope_type="split",
        vae_scale_factors=(4, 8, 8), **options,
    )  # fmt: skip


def _autoencoder() -> AutoencoderKLLTX2Video:
    return AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8, 8, 8), down_block_types=("LTX2VideoDownBlock3D",) * 3,
        decoder_block_out_channels=(8, 8, 8), layers_per_block=(1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, True), decoder_spatio_temporal_scaling=(True, True, True),
        decoder_inject_noise=(False,) * 4, downsample_type=("spatial", "temporal", "spatiotemporal"),
        upsample_type=("spatiotemporal", "temporal", "spatial"), upsample_residual=(False,) * 3,
        upsample_factor=(1, 1, 1), patch_size=2, spatial_compression_ratio=8, temporal_compression_ratio=4,
        decoder_causal=False,
    )  # fmt: skip


def _vocoder(*, later: bool) -> LTX2Vocoder | LTX2VocoderWithBWE:
    common: dict[str, Any] = {
        "in_channels": 2 * 16, "hidden_channels": 16, "resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]],
    }  # fmt: skip
    if not later:
        return LTX2Vocoder(
            **common, upsample_kernel_sizes=[11, 4, 4], upsample_factors=[5, 4, 2], output_sampling_rate=24000
        )
    # 160 samples a mel frame, the hop, so that the second stage's own spectrogram is as long.
    vocoder = LTX2VocoderWithBWE(
        **common, upsample_kernel_sizes=[11, 16, 4, 4], upsample_factors=[5, 8, 2, 2], bwe_in_channels=2 * 16,
        bwe_hidden_channels=16, bwe_upsample_kernel_sizes=[12, 11, 16], bwe_upsample_factors=[6, 5, 8],
        bwe_resnet_kernel_sizes=[3], bwe_resnet_dilations=[[1, 3, 5]], filter_length=64, hop_length=80,
        window_length=64, num_mel_channels=16,
    )  # fmt: skip
    for buffer in vocoder.mel_stft.buffers():  # zero as constructed: real ones come with the weights
        nn.init.normal_(buffer, std=0.1)
    return vocoder


_SIZE: dict[str, Any] = {
    "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4, "guidance_scale": 3.0,
    "max_sequence_length": 48,
}  # fmt: skip
PLAIN_GUIDANCE: dict[str, Any] = {
    "stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0, "audio_guidance_scale": None,
    "audio_stg_scale": None, "audio_modality_scale": None, "audio_guidance_rescale": None,
    "spatio_temporal_guidance_blocks": None,
}  # fmt: skip
"""Arguments of the pipeline that leave classifier-free guidance alone, with one scale for both streams."""


# The bound: guidance 3 multiplies the rounding of both passes, and the way to clean latents and back adds to it.
def _spec(version: str) -> Tiny:
    call = {**_SIZE, **PLAIN_GUIDANCE, "frame_rate": 24.0, "use_cross_timestep": version == "2.3"}
    return Tiny(build=lambda: tiny_ltx2(version=version), request={**_SIZE, "fps": 24.0}, call=call, batch_bound=4e-6)


TINY: dict[str, Tiny] = {"ltx2": _spec("2.0"), "ltx2.3": _spec("2.3")}
"""Name of a tiny checkpoint -> how it is made and used."""
