"""Small random SANA checkpoints: with the multistep solver of the released ones, and with Euler's."""

from __future__ import annotations

import string
from typing import Any

from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from verst.families.tiny.spec import Tiny


def tiny_sana(*, euler: bool) -> SanaPipeline:
    """About 0.1 M random parameters; images in multiples of 32 pixels."""
    tokenizer = gemma_tokenizer(max_length=2048)
    width, blocks = 16, ("ResBlock",) * 4 + ("EfficientViTBlock",) * 2
    if euler:
        scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    else:
        scheduler = DPMSolverMultistepScheduler(flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction")
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(
            Gemma2Config(
                vocab_size=len(tokenizer),
                hidden_size=width,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                max_position_embeddings=2048,
                pad_token_id=0,
                eos_token_id=1,
                bos_token_id=2,
                sliding_window=64,
                initializer_range=0.2,
            )
        ).eval(),
        vae=AutoencoderDC(
            latent_channels=4,
            attention_head_dim=8,
            encoder_block_types=blocks,
            decoder_block_types=blocks,
            encoder_block_out_channels=(8,) * 6,
            decoder_block_out_channels=(8,) * 6,
            encoder_layers_per_block=(1,) * 6,
            decoder_layers_per_block=(1,) * 6,
            encoder_qkv_multiscales=((), (), (), (), (5,), (5,)),
            decoder_qkv_multiscales=((), (), (), (), (5,), (5,)),
            downsample_block_type="Conv",
            upsample_block_type="interpolate",
            scaling_factor=0.41407,
        ),
        transformer=SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=4,
            attention_head_dim=8,
            num_layers=2,
            num_cross_attention_heads=4,
            cross_attention_head_dim=8,
            cross_attention_dim=32,
            caption_channels=width,
            sample_size=32,
            mlp_ratio=2.0,
        ),
        scheduler=scheduler,
    )


def gemma_tokenizer(*, max_length: int) -> GemmaTokenizer:
    """One token a printable character, one a byte for the rest."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    tokens += [*string.ascii_letters, *string.digits, *string.punctuation, "\n"]
    return GemmaTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=max_length
    )


_REQUEST: dict[str, Any] = {
    "height": 96,
    "width": 64,
    "num_inference_steps": 4,
    "guidance_scale": 4.0,
    "max_sequence_length": 64,
}
_CALL: dict[str, Any] = {**_REQUEST, "use_resolution_binning": False}
_BOUND = 4e-6
"""Guidance 4 multiplies the rounding of the two sides."""

TINY: dict[str, Tiny] = {
    "sana": Tiny(build=lambda: tiny_sana(euler=False), request=_REQUEST, call=_CALL, euler=False, batch_bound=_BOUND),
    "sana-euler": Tiny(build=lambda: tiny_sana(euler=True), request=_REQUEST, call=_CALL, batch_bound=_BOUND),
}
