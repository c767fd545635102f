"""HPS v2.1 (arXiv 2306.09341): CLIP ViT-H/14 trained on human preferences, published as an open_clip state dict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from verst.config.rewards import HpsV2Reward, reward_name
from verst.errors import ConfigError
from verst.rewards import clip
from verst.rewards.base import RewardBatch
from verst.rewards.clip import Clip, cosines
from verst.rewards.frozen import built, folder_of, lacking, lacking_file, pictures, refuse, state_of


class HpsV2:
    """scale * cos(image, prompt), in [-scale, scale]; about 0.2 to 0.35 at scale 1.

    An image that is not square is fitted into the square with black borders, not cropped: the reference does so.
    """

    def __init__(self, config: HpsV2Reward) -> None:
        """Loads the folder, or the folder's config with the weights of `checkpoint`. Raises ConfigError."""
        self.name = reward_name(config)
        self._config = config
        self._scale = config.scale
        refuse(config, needs(config))
        model = None if config.checkpoint is None else clip_of_open_clip(config, Path(config.checkpoint).expanduser())
        self._clip = Clip(config.path, config, model=model)

    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score. Raises RewardError for a prompt that is too long."""
        frames = pictures(batch)
        if frames.shape[1] == frames.shape[2]:
            images = self._clip.images(frames)
        else:
            images = self._clip.images(letterbox(frames, self._clip.image_size), do_resize=False)
        return [self._scale * value for value in cosines(images, self._clip.prompts(self._config, batch.prompts))]


def letterbox(frames: Tensor, size: int) -> Tensor:
    """uint8 [N, size, size, 3] of [N, H, W, 3]: the longer side becomes `size` (bicubic), the rest is black."""
    height, width = frames.shape[1:3]
    scale = size / max(height, width)
    new_height, new_width = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (size - new_height) // 2, (size - new_width) // 2
    out = torch.zeros(len(frames), size, size, 3, dtype=torch.uint8)
    for i, frame in enumerate(frames.cpu().numpy()):
        resized = Image.fromarray(frame).resize((new_width, new_height), Image.Resampling.BICUBIC)
        out[i, top : top + new_height, left : left + new_width] = torch.from_numpy(np.array(resized))
    return out


def needs(config: HpsV2Reward) -> list[str]:
    """What the folder lacks, and the file of weights where one is named."""
    if config.checkpoint is None:
        return clip.needs(config)
    return lacking(config.path, clip.NEEDS) + lacking_file(config.checkpoint, key="checkpoint")


def clip_of_open_clip(config: HpsV2Reward, checkpoint: Path) -> Any:
    """A CLIPModel of the folder's config.json with the weights of an open_clip file. Raises ConfigError."""
    from transformers import CLIPConfig, CLIPModel

    state = to_transformers(state_of(config, checkpoint), config, source=checkpoint)
    model_config = CLIPConfig.from_pretrained(folder_of(config.path))
    return built(CLIPModel, model_config, state, config, source=checkpoint)


_NAMES = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
_TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
"""open_clip multiplies from the left (x @ proj), a Linear by its transposed weight."""
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)$")
_PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}


def to_transformers(state: Mapping[str, Tensor], config: HpsV2Reward, *, source: Path) -> dict[str, Tensor]:
    """An open_clip state dict (CLIP with both towers) under the names of CLIPModel. Raises ConfigError for an unknown name."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name == "attn_mask":
            continue
        if name in _NAMES:
            out[_NAMES[name]] = tensor
        elif name in _TRANSPOSED:
            out[_TRANSPOSED[name]] = tensor.T.contiguous()
        else:
            # nn.MultiheadAttention keeps its packed parameters without a dot: in_proj_weight.
            match = _BLOCK.match(re.sub(r"in_proj_(weight|bias)$", r"in_proj.\1", name))
            if match is None or (match[3] not in _PARTS and match[3] != "attn.in_proj"):
                raise ConfigError(f"reward {reward_name(config)}: {source}: {name} is no weight of an open_clip CLIP")
            layer = f"{'vision' if match[1] else 'text'}_model.encoder.layers.{match[2]}"
            if match[3] == "attn.in_proj":
                for part, piece in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True):
                    out[f"{layer}.self_attn.{part}.{match[4]}"] = piece
            else:
                out[f"{layer}.{_PARTS[match[3]]}.{match[4]}"] = tensor
    return out
