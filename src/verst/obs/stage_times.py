"""The spans of an iteration as metrics: what a microgroup spends in each stage, how busy who works is, how many wait."""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PERCENTILES = (50, 95, 99)
WAITS = {"engine_wait": "engine", "queue": "engine", "parse_wait": "parser", "reward_wait": "reward"}
"""Name of a wait -> the kind that is waited for; of rewards the span's `reward` says which."""
PHASES = ("sleep", "wake", "publish", "update")
"""Of the driver, in training and in a weight hand-off."""
Intervals = dict[str, "array[float]"]
"""Something -> start, end, start, end, ... in seconds."""
STAGES = (
    "generate",
    "engine_wait",
    "request",
    "queue",
    "encode",
    "denoise",
    "decode",
    "ship",
    "transfer",
    "deserialize",
    "parse_wait",
    "parse",
    "reward",
    "reward_wait",
    "score",
    "group_wait",
    "filter",
)
"""Names of spans that are summed up."""


class StageTimes:
    """Fed span by span; little memory, and none that stays after `metrics`."""

    def __init__(self, capacity: Mapping[str, int]) -> None:
        """capacity: kind of lane -> number of lanes; of other kinds no utilisation is known."""
        self._capacity = dict(capacity)
        self._work: dict[int, Intervals] = {}
        """rollout -> what each lane did for it."""
        self._reset()

    def _reset(self) -> None:
        self._since_s = time.monotonic()
        self._seconds: dict[str, array[float]] = defaultdict(_doubles)
        self._busy: Intervals = defaultdict(_doubles)
        self._waits: Intervals = defaultdict(_doubles)

    def add(self, name: str, start_s: float, end_s: float, *, lane: str | None, attributes: Mapping[str, Any]) -> None:
        rollout = attributes.get("rollout")
        if rollout is None or rollout >= 0:
            if name in STAGES or name in PHASES:
                self._seconds[name].append(end_s - start_s)
            if name in WAITS and end_s > start_s:
                kind = WAITS[name]
                kind = f"{kind}/{attributes['reward']}" if kind == "reward" else kind
                self._waits[kind].extend((start_s, end_s))
        if lane is None or not is_work(name, attributes):
            return
        if lane.rpartition(":")[0] in self._capacity:
            self._busy[lane].extend((start_s, end_s))
        if rollout is not None and rollout >= 0:
            self._work.setdefault(rollout, defaultdict(_doubles))[lane].extend((start_s, end_s))

    def metrics(self) -> dict[str, float]:
        """Since the last call."""
        elapsed_s = max(time.monotonic() - self._since_s, 1e-9)
        values = {f"perf/{n}_s": sum(s) / len(s) for n in PHASES if (s := self._seconds.get(n))}
        for stage in STAGES:
            if seconds := self._seconds.get(stage):
                named = {"mean_s": sum(seconds) / len(seconds)}
                named |= dict(zip((f"p{p}_s" for p in PERCENTILES), percentiles(seconds, PERCENTILES), strict=True))
                values |= {f"perf/stage/{stage}/{name}": value for name, value in named.items()}
        busy = _by_kind(self._busy)
        for kind in ("engine", "parser", "trainer"):
            if kind in self._capacity:
                values[f"perf/{kind}/utilisation"] = busy.get(kind, (0, 0.0))[1] / elapsed_s / self._capacity[kind]
        for kind, waits in self._waits.items():
            pairs = _pairs(waits)
            values[f"perf/{kind}/mean_queue"] = sum(end - start for start, end in pairs) / elapsed_s
            if not kind.startswith("reward/"):  # their pools count samples
                values[f"perf/{kind}/max_queue"] = float(most_at_a_time(pairs))
        self._reset()
        return values

    def longest_s(self, rollout: int) -> float:
        """Seconds that the busiest kind of lane would need for this rollout by itself, its work evenly spread.

        Forgets this rollout and those before it.
        """
        work = self._work.get(rollout, {})
        for number in [n for n in self._work if n <= rollout]:
            del self._work[number]
        return max(
            (
                seconds / max(1, min(pieces, self._capacity.get(kind, 1)))
                for kind, (pieces, seconds) in _by_kind(work).items()
            ),
            default=0.0,
        )


def is_work(name: str, attributes: Mapping[str, Any]) -> bool:
    """A span with a lane is time of that lane; a request is not where the engine says what it did in it, and when."""
    return name not in ("request", "queue") or (name == "request" and "batch" not in attributes)


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of them goes on."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _by_kind(lanes: Mapping[str, array[float]]) -> dict[str, tuple[int, float]]:
    """kind -> pieces of work, and the seconds in which its lanes were busy."""
    kinds: dict[str, tuple[int, float]] = {}
    for lane, ends in lanes.items():
        kind = lane.rpartition(":")[0]
        pieces, seconds = kinds.get(kind, (0, 0.0))
        kinds[kind] = (pieces + len(ends) // 2, seconds + covered_s(_pairs(ends)))
    return kinds


def _pairs(ends: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(ends[::2], ends[1::2], strict=True))


def _doubles() -> array[float]:
    return array("d")


def percentiles(values: Iterable[float], at: Sequence[int]) -> list[float]:
    """The nearest-rank percentiles of at least one value."""
    ordered = sorted(values)
    return [ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in at]


def most_at_a_time(intervals: Iterable[tuple[float, float]]) -> int:
    """The largest number of them that go on at one moment; one that ends when another begins is not with it."""
    number = most = 0
    for _, sign in sorted((at, sign) for start, end in intervals for at, sign in ((start, 1), (end, -1))):
        number += sign
        most = max(most, number)
    return most
