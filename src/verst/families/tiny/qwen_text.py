"""Qwen tokenizers and text encoders of toy width, with as many layers as a pipeline reads from."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ROLES = "system\nuser\nassistant\n"


def qwen_tokenizer(*texts: str, max_length: int = 2048) -> Qwen2Tokenizer:
    """Byte-level BPE in which every word of `texts` is one token, as the common words of real prompts are.

    Pipelines cut their own template off by its number of tokens, so a template must have as many here.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    special = "|".join(map(re.escape, SPECIAL_TOKENS))
    trained.train_from_iterator([part for text in (_ROLES, *texts) for part in re.split(special, text)], trainer)
    parts = _parts(trained)
    tokenizer = Qwen2Tokenizer(vocab=parts["vocab"], merges=parts["merges"], model_max_length=max_length)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def qwen3_vl(tokenizer: Qwen2Tokenizer, *, num_layers: int, width: int) -> Qwen3VLModel:
    """A vision-language model whose picture side is as small as it can be: text alone goes in."""
    return Qwen3VLModel(_qwen3_vl_config(tokenizer, num_layers=num_layers, width=width)).eval()


def qwen3_vl_for_generation(
    tokenizer: Qwen2Tokenizer, *, num_layers: int, width: int
) -> Qwen3VLForConditionalGeneration:
    return Qwen3VLForConditionalGeneration(_qwen3_vl_config(tokenizer, num_layers=num_layers, width=width)).eval()


def _qwen3_vl_config(tokenizer: Qwen2Tokenizer, *, num_layers: int, width: int) -> Qwen3VLConfig:
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": width,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    vocab = tokenizer.get_vocab()
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return Qwen3VLConfig(
        text_config={**_text_config(tokenizer, num_layers=num_layers, width=width), "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=vocab["<|image_pad|>"],
        video_token_id=vocab["<|video_pad|>"],
        vision_start_token_id=vocab["<|vision_start|>"],
        vision_end_token_id=vocab["<|vision_end|>"],
    )


def qwen3(tokenizer: Qwen2Tokenizer, *, num_layers: int, width: int) -> Qwen3Model:
    return Qwen3Model(Qwen3Config(**_text_config(tokenizer, num_layers=num_layers, width=width))).eval()


def _text_config(tokenizer: Qwen2Tokenizer, *, num_layers: int, width: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": tokenizer.model_max_length,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _parts(tokenizer: Tokenizer) -> dict[str, Any]:

    model = json.loads(tokenizer.to_str())["model"]
    merges: Sequence[Any] = model["merges"]
    return {
        "vocab": model["vocab"],
        "merges": [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges],
    }
