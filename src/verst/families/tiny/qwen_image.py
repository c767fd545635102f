"""Small random checkpoints of the Qwen-Image lineage."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageLayeredPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from verst.families.tiny.qwen_text import qwen_tokenizer
from verst.families.tiny.spec import Tiny

PROMPTS = ("a red cat on a table", "two big dogs running in the street at night")
TEXT_WIDTH = 32


def tiny_qwen_image() -> QwenImagePipeline:
    """About 0.2 M random parameters; images in multiples of 16 pixels."""
    empty: Any = QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=None)
    tokenizer = qwen_tokenizer(empty.prompt_template_encode, *PROMPTS)
    return QwenImagePipeline(
        scheduler=qwen_scheduler(),
        vae=qwen_autoencoder(z_dim=4),
        text_encoder=qwen25_vl(tokenizer),
        tokenizer=tokenizer,
        transformer=qwen_transformer(z_dim=4),
    )


def qwen_scheduler(**changes: Any) -> FlowMatchEulerDiscreteScheduler:
    """As released: the shift grows with the number of tokens, and the last step starts at sigma = 0.02."""
    config: dict[str, Any] = {
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "shift": 1.0,
        "shift_terminal": 0.02,
    }
    return FlowMatchEulerDiscreteScheduler(**{**config, **changes})


def qwen_transformer(*, z_dim: int, **options: Any) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * z_dim,
        out_channels=z_dim,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
        **options,
    )


def qwen_autoencoder(*, z_dim: int, num_halvings: int = 3, channels: int = 3, width: int = 4) -> AutoencoderKLQwenImage:
    """2^num_halvings pixels a latent column; two of the halvings would be of time as well."""
    return AutoencoderKLQwenImage(
        base_dim=width,
        z_dim=z_dim,
        dim_mult=[1, 1, *[2] * (num_halvings - 1)],
        num_res_blocks=1,
        temperal_downsample=[*[False] * (num_halvings - 2), True, True],
        input_channels=channels,
        latents_mean=[0.1 * (-1) ** i for i in range(z_dim)],
        latents_std=[1.5 - 0.1 * i for i in range(z_dim)],
    )


def qwen25_vl(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": tokenizer.model_max_length,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
    ids: Any = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def edit_processor(tokenizer: Qwen2Tokenizer) -> Qwen2VLProcessor:
    """Every picture becomes four tokens of text."""
    size = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, patch_size=14, merge_size=2),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=size, patch_size=14, merge_size=2),
        chat_template=tokenizer.chat_template,
    )


def tiny_qwen_image_edit(
    pipeline_class: Any, *, z_dim: int = 4, channels: int = 3, shift_terminal: float | None = 0.02, **transformer: Any
) -> Any:
    """Images in multiples of 64 pixels: the pipelines scale a source picture to a million pixels, and with a coarse
    autoencoder that is 256 tokens.
    """
    empty = pipeline_class(
        scheduler=None, vae=None, text_encoder=None, tokenizer=None, processor=None, transformer=None
    )
    tokenizer = qwen_tokenizer(empty.prompt_template_encode, "Picture 1: 2: 3:", *PROMPTS)
    return pipeline_class(
        scheduler=qwen_scheduler(shift_terminal=shift_terminal),
        vae=qwen_autoencoder(z_dim=z_dim, num_halvings=5, channels=channels, width=2),
        text_encoder=qwen25_vl(tokenizer),
        tokenizer=tokenizer,
        processor=edit_processor(tokenizer),
        transformer=qwen_transformer(z_dim=z_dim, **transformer),
    )


_SIZE: dict[str, Any] = {"height": 64, "width": 48, "num_inference_steps": 4, "max_sequence_length": 64}

_EDIT_SIZE: dict[str, Any] = {"height": 128, "width": 192, "num_inference_steps": 4, "max_sequence_length": 64}


def _edit(pipeline_class: Any, *, num_images: int, **transformer_options: Any) -> Tiny:
    return Tiny(
        build=lambda: tiny_qwen_image_edit(pipeline_class, **transformer_options),
        request={**_EDIT_SIZE, "guidance_scale": 4.0},
        call={**_EDIT_SIZE, "true_cfg_scale": 4.0},
        prompts=PROMPTS,
        num_images=num_images,
    )


def _colours_and_opacity(layers: Tensor) -> Tensor:
    """[L, H, W, 4] -> [2 L, H, W, 3]."""
    colours, opacity = layers[..., :3], layers[..., 3:].expand(*layers.shape[:3], 3)
    return torch.stack([colours, opacity], dim=1).flatten(0, 1)


def _tiny_layered() -> Any:
    # With 4 latent channels the pipeline would take an RGBA picture for latents.
    return tiny_qwen_image_edit(
        QwenImageLayeredPipeline,
        z_dim=6,
        channels=4,
        shift_terminal=None,
        use_additional_t_cond=True,
        use_layer3d_rope=True,
    )


_LAYERED: dict[str, Any] = {"num_inference_steps": 4, "max_sequence_length": 64}

TINY: dict[str, Tiny] = {
    "qwen-image-layered": Tiny(
        build=_tiny_layered,
        request={**_LAYERED, "num_frames": 2, "guidance_scale": 4.0},
        call={**_LAYERED, "layers": 2, "true_cfg_scale": 4.0},
        prompts=PROMPTS,
        num_images=1,
        image_mode="RGBA",
        as_frames=_colours_and_opacity,
        batch_bound=2e-6,  # over 400 tokens, attention with a mask and without one differ by 1.1e-6
    ),
    "qwen-image-edit": _edit(QwenImageEditPipeline, num_images=1),
    "qwen-image-edit-plus": _edit(QwenImageEditPlusPipeline, num_images=2, zero_cond_t=True),
    "qwen-image": Tiny(
        build=tiny_qwen_image,
        request={**_SIZE, "guidance_scale": 4.0},
        call={**_SIZE, "true_cfg_scale": 4.0},
        prompts=PROMPTS,
    ),
}
