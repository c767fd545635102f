"""CLIP (arXiv 2103.00020): unit vectors of images and texts, shared by the rewards that are built on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from verst.config.rewards import ModelReward, PromptReward
from verst.rewards.frozen import (
    PROCESSOR,
    TOKENIZER,
    WEIGHTS,
    chunks,
    device_of,
    folder_of,
    image_processor,
    lacking,
    long_prompt_problems,
    pretrained,
    processed,
    tokenizer_of,
    tokens,
)

VISION_NEEDS = ("config.json", *PROCESSOR)
NEEDS = (*VISION_NEEDS, *TOKENIZER)


class Clip:
    """A CLIPModel with its processor and tokenizer. Rows do not depend on each other."""

    def __init__(self, path: str, config: ModelReward, *, model: Any = None) -> None:
        """Loads the folder; `model`: a CLIPModel that takes the place of its weights. Raises ConfigError."""
        from transformers import CLIPModel

        folder = folder_of(path)
        self._config = config
        self._device = device_of(config)
        self._model: Any = model if model is not None else pretrained(CLIPModel, folder, config)
        self._processor = image_processor(folder, config)
        self._tokenizer = tokenizer_of(folder)
        self._limit: int = self._model.config.text_config.max_position_embeddings

    @property
    def logit_scale(self) -> float:
        """exp of the learned temperature: about 100 in published checkpoints."""
        return float(self._model.logit_scale.exp())

    @property
    def image_size(self) -> int:
        """Pixels of a side of what the vision tower takes."""
        return int(self._model.config.vision_config.image_size)

    @torch.no_grad()
    def images(self, frames: Tensor, **options: Any) -> Tensor:
        """Unit vectors fp32 [N, D] of uint8 [N, H, W, 3]; options: of the processor's call."""
        vectors = []
        for rows in chunks(len(frames), self._config.batch_size):
            pixels = processed(self._processor, frames[rows], self._device, **options)["pixel_values"]
            features = self._model.get_image_features(pixel_values=pixels.to(self._model.dtype))
            vectors.append(features.pooler_output.float())
        return normalize(torch.cat(vectors), dim=-1)

    def prompts(self, config: PromptReward, prompts: Sequence[str]) -> Tensor:
        """Unit vectors fp32 [N, D]; equal prompts are encoded once. Raises RewardError for one that is too long."""
        unique = list(dict.fromkeys(prompts))
        inputs = tokens(config, self._tokenizer, unique, self._limit)
        return self._texts(inputs)[[unique.index(prompt) for prompt in prompts]]

    def sentences(self, sentences: Sequence[str]) -> Tensor:
        """Unit vectors fp32 [N, D] of sentences of the reward's own, all short."""
        inputs = self._tokenizer(list(sentences), padding="max_length", max_length=self._limit, return_tensors="pt")
        return self._texts(inputs)

    @torch.no_grad()
    def _texts(self, inputs: Any) -> Tensor:
        ids, mask = inputs["input_ids"].to(self._device), inputs["attention_mask"].to(self._device)
        rows = [
            self._model.get_text_features(input_ids=ids[rows], attention_mask=mask[rows]).pooler_output.float()
            for rows in chunks(len(ids), self._config.batch_size)
        ]
        return normalize(torch.cat(rows), dim=-1)


def cosines(images: Tensor, texts: Tensor) -> list[float]:
    """Row by row, of unit vectors [N, D]."""
    return [float(value) for value in (images * texts).sum(dim=-1)]


def prompt_problems(config: PromptReward, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each prompt longer than the text tower takes; loads the tokenizer alone."""
    from transformers import CLIPConfig

    folder = folder_of(config.path)
    text: Any = CLIPConfig.from_pretrained(folder).text_config
    return long_prompt_problems(config, tokenizer_of(folder), prompts, text.max_position_embeddings)


def needs(config: ModelReward) -> list[str]:
    """What the folder of a reward lacks whose weights are those of the folder."""
    return lacking(config.path, (*NEEDS, *WEIGHTS))
