"""ImageReward v1.0 (arXiv 2304.05977): BLIP reads the prompt while it looks at the image, and a head rates the pair."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.config.rewards import ImageRewardReward, reward_name
from verst.errors import ConfigError
from verst.rewards.base import RewardBatch
from verst.rewards.frozen import (
    TOKENIZER,
    built,
    chunks,
    device_of,
    fill,
    folder_of,
    frozen,
    lacking,
    long_prompt_problems,
    pictures,
    processed,
    rating_head,
    refuse,
    shape_of,
    state_of,
    tokenizer_of,
    tokens,
)

CHECKPOINT, TEXT_CONFIG = "ImageReward.pt", "med_config.json"
NUM_TOKENS = 35
"""Longest prompt, with [CLS] and [SEP]: the model was trained on no more."""
_MEAN, _STD = 0.16717362830052426, 1.0333394966054072
"""Of raw ratings over the validation set, from the published model."""
_HEAD_WIDTH = 64
"""Channels of an attention head in every published ViT of BLIP: the checkpoint does not say."""


class ImageReward:
    """(rating - mean) / std: about -2.3 to 2, mean 0 over the model's own validation set."""

    def __init__(self, config: ImageRewardReward) -> None:
        """Loads the original checkpoint. Raises ConfigError."""
        self.name = reward_name(config)
        self._config = config
        self._device = device_of(config)
        refuse(config, needs(config))
        folder = folder_of(config.path)
        self._tokenizer = tokenizer_of(folder)
        self._vision, self._text, self._head = load_blip(folder, config)
        self._processor = _processor(self._vision.config.image_size, self._device)

    @torch.no_grad()
    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score. Raises RewardError for a prompt that is too long."""
        frames = pictures(batch)
        inputs = tokens(self._config, self._tokenizer, batch.prompts, NUM_TOKENS).to(self._device)
        scores: list[float] = []
        for rows in chunks(len(frames), self._config.batch_size):
            pixels = processed(self._processor, frames[rows], self._device)["pixel_values"]
            image = self._vision(pixel_values=pixels.to(self._vision.dtype)).last_hidden_state
            read = self._text(
                input_ids=inputs["input_ids"][rows],
                attention_mask=inputs["attention_mask"][rows],
                encoder_hidden_states=image,
            )
            ratings = self._head(read.last_hidden_state[:, 0].float())[:, 0]
            scores += [(float(rating) - _MEAN) / _STD for rating in ratings]
        return scores


def needs(config: ImageRewardReward) -> list[str]:
    """What the folder lacks."""
    return lacking(config.path, (CHECKPOINT, TEXT_CONFIG, *TOKENIZER))


def prompt_problems(
    config: ImageRewardReward, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[str]:
    """One line for each prompt of more than 35 tokens; loads the tokenizer alone."""
    return long_prompt_problems(config, tokenizer_of(folder_of(config.path)), prompts, NUM_TOKENS)


def _processor(size: int, device: torch.device) -> Any:
    """The shorter side to `size` (bicubic), the middle square, CLIP's mean and std: what the model was trained with."""
    from transformers import CLIPImageProcessor, CLIPImageProcessorPil

    kind: Any = CLIPImageProcessor if device.type == "cuda" else CLIPImageProcessorPil
    return kind(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def load_blip(folder: Path, config: ImageRewardReward) -> tuple[Any, Any, nn.Sequential]:
    """Vision tower, text encoder with cross attention, and rating head. Raises ConfigError."""
    from transformers import BlipTextModel, BlipVisionModel

    source = folder / CHECKPOINT
    state = state_of(config, source)
    text_values = _json(folder / TEXT_CONFIG)
    vision_config = _vision_config(state, config, source)
    text_config = _text_config(text_values, vision_config.hidden_size, folder)
    vision_state, text_state, head_state = split_state(state)
    head = rating_head(text_config.hidden_size)
    fill(head, head_state, config, source=source)
    return (
        built(BlipVisionModel, vision_config, vision_state, config, source=source),
        built(BlipTextModel, text_config, text_state, config, source=source, add_pooling_layer=False),
        frozen(head, config),
    )


def _vision_config(state: Mapping[str, Tensor], config: ImageRewardReward, source: Path) -> Any:
    from transformers import BlipVisionConfig

    tower = "blip.visual_encoder."
    width, _, patch, _ = shape_of(state, tower + "patch_embed.proj.weight", config, source=source)
    num_positions = shape_of(state, tower + "pos_embed", config, source=source)[1]
    return BlipVisionConfig(
        hidden_size=width,
        intermediate_size=shape_of(state, tower + "blocks.0.mlp.fc1.weight", config, source=source)[0],
        num_hidden_layers=1 + max(int(m[1]) for name in state if (m := re.match(tower + r"blocks\.(\d+)\.", name))),
        num_attention_heads=width // _HEAD_WIDTH,
        image_size=patch * round((num_positions - 1) ** 0.5),
        patch_size=patch,
        hidden_act="gelu",
        # timm's ViT, from which the weights come; the config's own default is 1e-5.
        layer_norm_eps=1e-6,
    )


def _text_config(values: Mapping[str, Any], encoder_width: int, folder: Path) -> Any:
    from transformers import BlipTextConfig

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in (*names, "max_position_embeddings") if name not in values]
    if missing:
        raise ConfigError(f"reward image_reward: {folder / TEXT_CONFIG} has no {missing[0]}")
    return BlipTextConfig(
        **{name: values[name] for name in names},
        max_position_embeddings=values["max_position_embeddings"],
        hidden_act=values.get("hidden_act", "gelu"),
        layer_norm_eps=values.get("layer_norm_eps", 1e-12),
        encoder_hidden_size=encoder_width,
        # In transformers a BLIP text layer has cross attention when it may decode; the call itself is bidirectional.
        is_decoder=True,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"reward image_reward: {path} is no JSON: {error}") from error
    return values


_VISION_NAMES = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "norm.": "post_layernorm.",
}
_BLOCK_NAMES = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of BlipVisionModel, BlipTextModel and the head, of an ImageReward state dict.

    Left out: the two projections of BLIP's contrastive loss, which a rating does not pass, and the buffer position_ids.
    """
    vision: dict[str, Tensor] = {}
    text: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith("blip.visual_encoder."):
            vision[_vision_name(name.removeprefix("blip.visual_encoder."))] = tensor
        elif name.startswith("blip.text_encoder.") and not name.endswith("position_ids"):
            text[name.removeprefix("blip.text_encoder.")] = tensor
        elif name.startswith("mlp.layers."):
            head[name.removeprefix("mlp.layers.")] = tensor
    return vision, text, head


def _vision_name(name: str) -> str:
    match = re.match(r"blocks\.(\d+)\.(.+)\.(weight|bias)$", name)
    if match and match[2] in _BLOCK_NAMES:
        return f"encoder.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"
    for old, new in _VISION_NAMES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
