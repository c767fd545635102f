"""CLAP (arXiv 2211.06687): does the sound fit the prompt? Cosine similarity of two encoders trained on captioned sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from verst.config.rewards import ClapReward, reward_name
from verst.rewards.base import RewardBatch
from verst.rewards.clip import cosines
from verst.rewards.frozen import (
    PROCESSOR,
    TOKENIZER,
    WEIGHTS,
    chunks,
    device_of,
    folder_of,
    lacking,
    long_prompt_problems,
    pretrained,
    refuse,
    tokenizer_of,
    tokens,
)
from verst.rewards.sound import mono, resample

NUM_TOKENS = 77
"""Longest caption of CLAP's training."""


class Clap:
    """scale * cos(sound, prompt), in [-scale, scale].

    Sound longer than the model's window (10 s) is heard in as many windows as cover it, evenly spread, and the score is the
    mean over them: transformers would take a random crop, and a reward must say the same twice.
    """

    def __init__(self, config: ClapReward) -> None:
        """Loads the model. Raises ConfigError."""
        from transformers import ClapFeatureExtractor, ClapModel

        self.name = reward_name(config)
        self._config = config
        self._device = device_of(config)
        refuse(config, needs(config))
        folder = folder_of(config.path)
        self._extract: Any = ClapFeatureExtractor.from_pretrained(folder)
        self._tokenizer = tokenizer_of(folder)
        self._model = pretrained(ClapModel, folder, config)

    @torch.no_grad()
    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score; the pictures are not read. Raises RewardError for a batch without sound."""
        wave, rate = mono(batch, self.name)
        pieces = windows(resample(wave, rate, self._extract.sampling_rate), self._extract.nb_max_samples)
        texts = self._texts(batch.prompts)
        sounds = [self._sounds(piece) for piece in pieces.unbind(dim=1)]
        similarity = torch.tensor([cosines(sound, texts) for sound in sounds]).mean(dim=0)
        return [self._config.scale * float(value) for value in similarity]

    def _sounds(self, wave: Tensor) -> Tensor:
        rows = []
        for rows_of in chunks(len(wave), self._config.batch_size):
            features = self._extract(
                list(wave[rows_of].cpu().numpy()), sampling_rate=self._extract.sampling_rate, return_tensors="pt"
            )["input_features"].to(self._device, self._model.dtype)
            # Never longer than a window. The extractor would mark a random row of a batch as longer.
            longer = torch.zeros(len(features), 1, dtype=torch.bool, device=self._device)
            rows.append(self._model.get_audio_features(input_features=features, is_longer=longer).pooler_output.float())
        return normalize(torch.cat(rows), dim=-1)

    def _texts(self, prompts: Sequence[str]) -> Tensor:
        unique = list(dict.fromkeys(prompts))
        inputs = tokens(self._config, self._tokenizer, unique, NUM_TOKENS).to(self._device)
        features = self._model.get_text_features(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).pooler_output.float()
        return normalize(features, dim=-1)[[unique.index(prompt) for prompt in prompts]]


def windows(wave: Tensor, length: int) -> Tensor:
    """[B, W, min(n, length)] of [B, n]: as few windows as cover it, the first at its start and the last at its end."""
    total = wave.shape[-1]
    if total <= length:
        return wave[:, None]
    count = -(-total // length)
    starts = [round(i * (total - length) / (count - 1)) for i in range(count)]
    return torch.stack([wave[:, start : start + length] for start in starts], dim=1)


def needs(config: ClapReward) -> list[str]:
    """What the folder lacks."""
    return lacking(config.path, ("config.json", *PROCESSOR, *TOKENIZER, *WEIGHTS))


def prompt_problems(config: ClapReward, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each prompt that is too long; loads the tokenizer alone."""
    return long_prompt_problems(config, tokenizer_of(folder_of(config.path)), prompts, NUM_TOKENS)
