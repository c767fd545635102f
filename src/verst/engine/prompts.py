"""Prompt embeddings that are used again: the samples of a group, and the prompts of an evaluation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from verst.families import Components
from verst.types import Geometry, join_rows

Row = dict[str, Tensor]
"""Conditioning name -> [1, ...]"""


class _Key(NamedTuple):
    prompt: str
    max_sequence_length: int
    geometry: Geometry
    negative: bool


class PromptCache:
    """Least recently used rows go first; keyed by all that their encoding depends on, on the model's device.

    A prompt is always encoded alone, so its row has the same bits whatever else is asked for.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[_Key, Row] = OrderedDict()
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
    ) -> Row:
        """Conditioning [B, ...] of `prompts`, in their order."""
        found: dict[str, Row] = {}
        for prompt in dict.fromkeys(prompts):
            found[prompt] = self._row(components, _Key(prompt, max_sequence_length, geometry, negative))
        return join_rows([found[prompt] for prompt in prompts])

    def clear(self) -> None:
        self._rows.clear()
        self.num_bytes = 0

    def _row(self, components: Components, key: _Key) -> Row:
        if key in self._rows:
            self.num_hits += 1
            self._rows.move_to_end(key)
            return self._rows[key]
        self.num_misses += 1
        row = components.family.encode_prompts(
            components,
            [key.prompt],
            max_sequence_length=key.max_sequence_length,
            geometry=key.geometry,
            negative=key.negative,
        )
        self._rows[key] = row
        self.num_bytes += _num_bytes(row)
        while self.num_bytes > self._max_bytes and len(self._rows) > 1:
            _, dropped = self._rows.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)
        return row


def _num_bytes(row: Row) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in row.values())
