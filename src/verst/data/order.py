"""Which items make up which batch: a pure function of (seed, step), whatever came before.

Each bucket is an endless stream: its items over and over, every pass in an order of its own. In one round of as many
steps as there are items, a bucket of n items gives n batches, so that every item comes exactly batch_size times; which
bucket comes when is drawn for each round anew.
"""

from __future__ import annotations

import bisect
import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from verst.flow.noise import derive_seed

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class Slots(Generic[B]):
    """One batch: positions in a bucket's stream."""

    bucket: B
    first: int
    """The batch takes positions first, first + 1, ..."""


class Order(Generic[B]):
    def __init__(self, counts: Mapping[B, int], *, batch_size: int, seed: int) -> None:
        """counts: bucket -> number of its items, all above 0; their order matters."""
        self._buckets = list(counts)
        self._counts = dict(counts)
        self._batch_size = batch_size
        self._seed = seed
        self._total = sum(counts.values())
        self._round = functools.lru_cache(maxsize=2)(self._make_round)
        self._pass = functools.lru_cache(maxsize=4 * len(self._buckets))(self._make_pass)

    def batch(self, step: int) -> Slots[B]:
        """The batch of `step` >= 0."""
        number, offset = divmod(step, self._total)
        sequence, places = self._round(number)
        index = sequence[offset]
        before = bisect.bisect_left(places[index], offset)
        bucket = self._buckets[index]
        return Slots(bucket=bucket, first=(number * self._counts[bucket] + before) * self._batch_size)

    def item(self, bucket: B, position: int) -> int:
        """Which of the bucket's items stands at a position of its stream."""
        turn, offset = divmod(position, self._counts[bucket])
        return self._pass(self._buckets.index(bucket), turn)[offset]

    def _make_round(self, number: int) -> tuple[Sequence[int], list[list[int]]]:
        sequence = [index for index, bucket in enumerate(self._buckets) for _ in range(self._counts[bucket])]
        random.Random(derive_seed(self._seed, "buckets", number)).shuffle(sequence)
        places: list[list[int]] = [[] for _ in self._buckets]
        for place, index in enumerate(sequence):
            places[index].append(place)
        return sequence, places

    def _make_pass(self, index: int, turn: int) -> list[int]:
        order = list(range(self._counts[self._buckets[index]]))
        random.Random(derive_seed(self._seed, "pass", index, turn)).shuffle(order)
        return order
