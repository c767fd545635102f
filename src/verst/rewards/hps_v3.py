"""HPSv3 (arXiv 2508.03789): Qwen2-VL reads instruction, prompt and image, and a head rates them as a normal distribution."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from verst.config.rewards import HpsV3Reward, reward_name
from verst.errors import ConfigError
from verst.rewards.base import RewardBatch
from verst.rewards.frozen import (
    PROCESSOR,
    TOKENIZER,
    built,
    chunks,
    device_of,
    fill,
    folder_of,
    frozen,
    image_processor,
    lacking,
    pictures,
    processed,
    refuse,
    shape_of,
    state_of,
    tokenizer_of,
)

CHECKPOINT, INSTRUCTION = "HPSv3.safetensors", "instruction.txt"
_REWARD_TOKEN, _IMAGE_TOKEN, _PROMPT = "<|Reward|>", "<|image_pad|>", "{text_prompt}"
_NUM_PIXELS = 256 * 28 * 28
"""Every image is brought to about this many: the model was trained on no other."""


class HpsV3:
    """Mean mu of the rating, unbounded: published images get about -5 to 15. The second output, sigma, is not read."""

    def __init__(self, config: HpsV3Reward) -> None:
        """Loads the published checkpoint beside the config and processor of its base model. Raises ConfigError."""
        self.name = reward_name(config)
        self._config = config
        self._device = device_of(config)
        refuse(config, needs(config))
        folder = folder_of(config.path)
        self._instruction = _instruction(folder)
        self._tokenizer = tokenizer_of(folder)
        # The base model has no such token: training added it behind the vocabulary.
        self._tokenizer.add_special_tokens({"additional_special_tokens": [_REWARD_TOKEN]})
        self._reward_id, self._image_id = self._tokenizer.convert_tokens_to_ids([_REWARD_TOKEN, _IMAGE_TOKEN])
        self._processor = image_processor(folder, config)
        self._model, self._head = load_model(folder, config)

    @torch.no_grad()
    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score."""
        frames = pictures(batch)
        scores: list[float] = []
        for rows in chunks(len(frames), self._config.batch_size):
            scores += self._ratings(frames[rows], batch.prompts[rows])
        return scores

    def _ratings(self, frames: Tensor, prompts: Sequence[str]) -> list[float]:
        size = {"shortest_edge": _NUM_PIXELS, "longest_edge": _NUM_PIXELS}
        pixels = processed(self._processor, frames, self._device, size=size)
        grid = pixels["image_grid_thw"]
        per_token = self._processor.merge_size**2
        counts = [int(image.prod()) // per_token for image in grid]
        rows = [self._ids(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
        lengths = torch.tensor([len(row) for row in rows])
        ids = pad_sequence(rows, batch_first=True, padding_value=0).to(self._device)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long().to(self._device)
        hidden = self._model(
            input_ids=ids,
            attention_mask=mask,
            pixel_values=pixels["pixel_values"].to(self._model.dtype),
            image_grid_thw=grid,
            mm_token_type_ids=((ids == self._image_id) & (mask == 1)).int(),
            use_cache=False,
        ).last_hidden_state
        places = ((ids == self._reward_id) & (mask == 1)).int().argmax(dim=1)
        outputs = self._head(hidden[torch.arange(len(rows), device=self._device), places].float())
        return [float(mu) for mu in outputs[:, 0]]

    def _ids(self, prompt: str, num_image_tokens: int) -> Tensor:
        """Token ids of one chat of the base model: system line, image, filled-in instruction, start of the answer."""
        # A prompt that spells a special token is text like any other: it must not move the place that is rated.
        plain = re.sub(r"<\|(\w+)\|>", r"< |\1| >", prompt)
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"<|vision_start|>{_IMAGE_TOKEN * num_image_tokens}<|vision_end|>"
            f"{self._instruction.replace(_PROMPT, plain)}<|im_end|>\n<|im_start|>assistant\n"
        )
        ids: Tensor = self._tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
        return ids


def needs(config: HpsV3Reward) -> list[str]:
    """What the folder lacks."""
    return lacking(config.path, ("config.json", CHECKPOINT, INSTRUCTION, *PROCESSOR, *TOKENIZER))


def _instruction(folder: Path) -> str:
    """The text that the model was trained with. Raises ConfigError where its two places are not there once."""
    text = (folder / INSTRUCTION).read_text()
    for place in (_PROMPT, _REWARD_TOKEN):
        if text.count(place) != 1:
            raise ConfigError(
                f"reward hps_v3: {folder / INSTRUCTION} has {place} {text.count(place)} times, needed once: it is INSTRUCTION "
                "and then prompt_with_special_token of the published package's data_collator_qwen.py"
            )
    return text


def load_model(folder: Path, config: HpsV3Reward) -> tuple[Any, nn.Sequential]:
    """Qwen2VLModel without its language head, and the rating head in fp32. Raises ConfigError."""
    from transformers import Qwen2VLConfig, Qwen2VLModel

    source = folder / CHECKPOINT
    backbone, rating = split_state(state_of(config, source))
    model_config: Any = Qwen2VLConfig.from_pretrained(folder)
    # The vocabulary of the checkpoint: the base model's padding rows went when its embedding was resized.
    embedding = shape_of(backbone, "language_model.embed_tokens.weight", config, source=source)
    model_config.text_config.vocab_size = embedding[0]
    model = built(Qwen2VLModel, model_config, backbone, config, source=source)
    head = _head(rating, config, source)
    fill(head, rating, config, source=source)
    return model, frozen(head, config)


def _head(state: Mapping[str, Tensor], config: HpsV3Reward, source: Path) -> nn.Sequential:
    shapes = [shape_of(state, f"{i}.weight", config, source=source) for i in (0, 3, 5)]
    first, second, last = (nn.Linear(columns, rows) for rows, columns in shapes)
    return nn.Sequential(first, nn.ReLU(), nn.Dropout(0.05), second, nn.ReLU(), last)


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of Qwen2VLModel and of the head, whichever transformers wrote the file.

    Before 4.52 the layers were `model.layers...` and the vision tower `visual...`; since then both are under `model.`.
    The language head is left out: no word is generated.
    """
    backbone: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith("rm_head."):
            head[name.removeprefix("rm_head.")] = tensor
        elif not name.startswith("lm_head."):
            inner = name.removeprefix("model.")
            ours = inner.startswith(("visual.", "language_model."))
            backbone[inner if ours else f"language_model.{inner}"] = tensor
    return backbone, head
