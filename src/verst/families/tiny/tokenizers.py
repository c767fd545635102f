"""Tokenizers that need no vocabulary file and no network."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import pre_tokenizers
from transformers import ByT5Tokenizer, CLIPTokenizer

BYTES: tuple[str, ...] = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))
"""One printable character for each of the 256 bytes: with these, any text has tokens."""


def clip_tokenizer(alphabet: Iterable[str], *, max_length: int) -> CLIPTokenizer:
    """One token a character, with a second form for a word's last letter, and no merges. bos is 0, eos and pad are 1."""
    characters = list(alphabet)
    tokens = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{c}</w>" for c in characters)]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=max_length)


def t5_tokenizer(*, max_length: int) -> ByT5Tokenizer:
    """One token a byte (arXiv 2105.13626): 384 ids, and no file at all."""
    return ByT5Tokenizer(model_max_length=max_length)
