"""A small random MiniMax H3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Blocks,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
    ModularPipeline,
)
from transformers import Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

from verst.families.tiny.qwen_text import CHAT_TEMPLATE, qwen3_vl_for_generation, qwen_tokenizer
from verst.families.tiny.spec import Tiny

_PROMPTS = ("a red cat on a table", "two big dogs running in the street at night")
_TEXT_LAYERS = 51
"""The model reads the 50th hidden state, and it must not be the last."""
_WIDTH = 16
_CHANNELS, _AUDIO_CHANNELS = 4, 8


def tiny_minimax_h3() -> Any:
    """About 0.6 M random parameters; the shortest video it makes has 124 frames."""
    tokenizer = qwen_tokenizer(*_PROMPTS)
    blocks: Any = MiniMaxH3Blocks()
    pipeline = blocks.init_pipeline()
    pipeline.update_components(
        text_encoder=qwen3_vl_for_generation(tokenizer, num_layers=_TEXT_LAYERS, width=_WIDTH),
        tokenizer=tokenizer,
        processor=_processor(tokenizer),
        transformer=MiniMaxH3Transformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            ffn_dim=32,
            in_channels=_CHANNELS,
            audio_in_channels=_AUDIO_CHANNELS,
            text_dim=_WIDTH,
            freq_dim=16,
            time_embed_hidden_dim=16,
            time_embed_dim=16,
            rope_freq_dim=2,
        ),
        vae=AutoencoderKLMiniMaxH3(
            latent_channels=_CHANNELS,
            block_out_channels=(4, 4, 4, 4, 8, 8),
            layers_per_block=1,
            norm_num_groups=2,
            decoder_num_layers=1,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=8,
            decoder_num_register_tokens=2,
            decoder_ffn_mult=2,
            latents_mean=(0.1,) * _CHANNELS,
            latents_std=(1.5,) * _CHANNELS,
        ),
        audio_vae=AutoencoderKLMiniMaxH3Audio(
            encoder_dim=4,
            encoder_rates=(2, 4, 4, 5, 5),
            latent_dim=32,
            latent_channels=_AUDIO_CHANNELS,
            num_attention_heads=2,
            decoder_dim=4,
            decoder_rates=(20, 40),
            decoder_kernel_sizes=(22, 42),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1,),),
            latents_mean=[0.1] * _AUDIO_CHANNELS,
            latents_std=[1.5] * _AUDIO_CHANNELS,
        ),
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
    )
    return pipeline


def _processor(tokenizer: Qwen2Tokenizer) -> Qwen3VLProcessor:
    """The pipeline wants one, also where no picture goes in."""
    size = {"shortest_edge": 64 * 64, "longest_edge": 64 * 64}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, patch_size=16, merge_size=2),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=size, patch_size=16, merge_size=2),
        chat_template=CHAT_TEMPLATE,
    )


def _load(folder: Path) -> Any:
    pipeline: Any = ModularPipeline.from_pretrained(folder, workflow="t2va")
    pipeline.load_components(dtype=torch.float32)
    return pipeline


_SIZE: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 124}

TINY: dict[str, Tiny] = {
    "minimax-h3": Tiny(
        build=tiny_minimax_h3,
        load=_load,
        request={**_SIZE, "num_inference_steps": 4},
        call={**_SIZE, "num_inference_steps": 5},
        prompts=_PROMPTS,
        euler=False,
        data_minus_noise=True,
    )
}
