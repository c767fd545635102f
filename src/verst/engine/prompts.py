"""Conditioning that is used again: the samples of a group, and the prompts of an evaluation."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from verst.engine.images import ConditionImages
from verst.families import Components
from verst.families.base import SeesImages, TakesImages
from verst.types import Geometry, join_rows

Row = dict[str, Tensor]
"""Conditioning name -> [1, ...]"""
NO_IMAGES = ConditionImages()


class _Key(NamedTuple):
    prompt: str
    max_sequence_length: int
    geometry: Geometry
    negative: bool
    images: str
    """Digest of the condition images that the text encoder reads; "" for none."""


class _ImageKey(NamedTuple):
    digest: str
    geometry: Geometry


class PromptCache:
    """Least recently used rows go first; keyed by all that their encoding depends on, on the model's device.

    A prompt is always encoded alone, so its row has the same bits whatever else is asked for.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[_Key | _ImageKey, Row] = OrderedDict()
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def rows(
        self,
        components: Components,
        prompts: Sequence[str],
        *,
        max_sequence_length: int,
        geometry: Geometry,
        negative: bool = False,
        images: ConditionImages = NO_IMAGES,
    ) -> Row:
        """Conditioning [B, ...] of `prompts`, in their order, and of the images that all of them share."""
        family = components.family
        seen = images if isinstance(family, SeesImages) else NO_IMAGES
        found: dict[str, Row] = {}
        for prompt in dict.fromkeys(prompts):
            key = _Key(prompt, max_sequence_length, geometry, negative, seen.digest)
            found[prompt] = self._row(key, functools.partial(_encode, components, key, seen))
        rows = join_rows([found[prompt] for prompt in prompts])
        if images.pixels:
            assert isinstance(family, TakesImages), f"{family.name} was given condition images"
            image_key = _ImageKey(images.digest, geometry)
            row = self._row(
                image_key, functools.partial(family.encode_images, components, images.pixels, geometry), counted=False
            )
            rows |= {name: tensor.expand(len(prompts), *tensor.shape[1:]) for name, tensor in row.items()}
        return rows

    def clear(self) -> None:
        self._rows.clear()
        self.num_bytes = 0

    def _row(self, key: _Key | _ImageKey, encode: Callable[[], Row], *, counted: bool = True) -> Row:
        """counted: among hits and misses, which are of prompts."""
        if key in self._rows:
            self.num_hits += counted
            self._rows.move_to_end(key)
            return self._rows[key]
        self.num_misses += counted
        row = encode()
        self._rows[key] = row
        self.num_bytes += _num_bytes(row)
        while self.num_bytes > self._max_bytes and len(self._rows) > 1:
            _, dropped = self._rows.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)
        return row


def _encode(components: Components, key: _Key, images: ConditionImages) -> Row:
    family = components.family
    size: dict[str, Any] = {
        "max_sequence_length": key.max_sequence_length,
        "geometry": key.geometry,
        "negative": key.negative,
    }
    if images.pixels and isinstance(family, SeesImages):
        return family.encode_prompts_with_images(components, [key.prompt], images.pixels, **size)
    return family.encode_prompts(components, [key.prompt], **size)


def _num_bytes(row: Row) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in row.values())
