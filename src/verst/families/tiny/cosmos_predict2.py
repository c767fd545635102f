"""A small random Cosmos-Predict 2.5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    Cosmos2_5_PredictBasePipeline,
    CosmosTransformer3DModel,
    ModelMixin,
    UniPCMultistepScheduler,
)
from diffusers.configuration_utils import ConfigMixin
from torch import Tensor

from verst.families.tiny.qwen_image import TEXT_WIDTH, qwen25_vl
from verst.families.tiny.qwen_text import qwen_tokenizer
from verst.families.tiny.spec import Tiny

_PROMPTS = ("a red cat on a table", "two big dogs running in the street at night")
_TEXT_LAYERS = 2
_CHANNELS = 4


class PassAll(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A checker for the pipeline, which will not run without one: it has nothing against anything."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_device", torch.zeros(1), persistent=False)

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Tensor) -> Tensor:
        return frames


def tiny_cosmos_predict2() -> Cosmos2_5_PredictBasePipeline:
    """About 0.4 M random parameters; videos in multiples of 16 pixels and 1 + 4 k frames.

    Saved as the hub's folders are, without a checker: pass one to from_pretrained.
    """
    tokenizer = qwen_tokenizer("You are a helpful assistant who will provide prompts to an image generator.", *_PROMPTS)
    pipeline: Any = Cosmos2_5_PredictBasePipeline(
        text_encoder=qwen25_vl(tokenizer),
        tokenizer=tokenizer,
        transformer=CosmosTransformer3DModel(
            in_channels=_CHANNELS + 1,
            out_channels=_CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=32,
            adaln_lora_dim=8,
            max_size=(8, 16, 16),
            rope_scale=(1.0, 1.0, 1.0),
            concat_padding_mask=True,
            extra_pos_embed_type=None,
            use_crossattn_projection=True,
            crossattn_proj_in_channels=_TEXT_LAYERS * TEXT_WIDTH,
            encoder_hidden_states_channels=32,
        ),
        vae=AutoencoderKLWan(
            base_dim=4,
            z_dim=_CHANNELS,
            dim_mult=[1, 1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1] * _CHANNELS,
            latents_std=[1.5] * _CHANNELS,
        ),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            use_karras_sigmas=True,
            sigma_max=200.0,
            sigma_min=0.01,
        ),
        safety_checker=PassAll(),
    )
    pipeline.safety_checker = None
    pipeline.register_to_config(safety_checker=(None, None))
    return pipeline


def _load(folder: Path) -> Any:
    return Cosmos2_5_PredictBasePipeline.from_pretrained(folder, safety_checker=PassAll(), local_files_only=True)


_REQUEST: dict[str, Any] = {
    "height": 48,
    "width": 32,
    "num_frames": 5,
    "num_inference_steps": 4,
    "guidance_scale": 3.0,
    "max_sequence_length": 48,
}
_BOUND = 4e-6
"""Guidance multiplies the rounding of the two sides."""

TINY: dict[str, Tiny] = {
    "cosmos-predict2.5": Tiny(
        build=tiny_cosmos_predict2,
        load=_load,
        request=_REQUEST,
        call=_REQUEST,
        prompts=_PROMPTS,
        euler=False,
        batch_bound=_BOUND,
    )
}
