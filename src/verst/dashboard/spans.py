"""Spans of one run in columns, and what of them a picture of a time window needs.

Times are microseconds since the run's first span. docs/tracing.md says what the spans are.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

MAX_SPANS = 2_000_000
"""Kept in memory; beyond that the older half goes."""
NONE = -2
"""Stands for a number that a span does not say: -1 is the rollout of an evaluation."""
_NUMBERS = ("rollout", "group", "index", "iteration")
_KNOWN = {"time_s", "name", "duration_s", "lane", *_NUMBERS}
_COLUMNS: dict[str, str] = {"start": "d", "us": "d", "lane": "i", "name": "i", "extra": "i"} | dict.fromkeys(
    _NUMBERS, "i"
)
_BEFORE_WORK = {"request", "queue"}
"""Spans on a lane in which that engine does not work for the microgroup yet, or not only: they are the microgroup's."""
_PIXELS = 4000
"""Gaps narrower than this part of a window are not drawn, where spans must be merged."""


class Names:
    """Texts by number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


class SpanStore:
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.origin_s: float | None = None
        self._columns = {name: array(code) for name, code in _COLUMNS.items()}
        self._lanes, self._names, self._extras = Names(), Names(), Names()
        self._dropped = 0

    def __len__(self) -> int:
        """Spans ever added, those that were dropped included."""
        return self._dropped + len(self._columns["start"])

    def add(self, event: Mapping[str, Any]) -> None:
        """One line of spans.jsonl; one without a duration is no span."""
        if "duration_s" not in event:
            return
        if self.origin_s is None:
            self.origin_s = event["time_s"]
        extra = {key: value for key, value in event.items() if key not in _KNOWN}
        lane = event.get("lane")
        if event["name"] in _BEFORE_WORK:
            extra, lane = {"at": lane, **extra}, None
        numbers = {name: NONE if event.get(name) is None else int(event[name]) for name in _NUMBERS}
        # What is of no single microgroup and of nobody, such as a whole rollout, has a lane of its own.
        lane = lane or ("" if numbers["index"] != NONE else str(event["name"]))
        row = {
            "start": (event["time_s"] - self.origin_s) * 1e6,
            "us": event["duration_s"] * 1e6,
            "lane": self._lanes.number(lane),
            "name": self._names.number(str(event["name"])),
            "extra": self._extras.number(json.dumps(extra)) if extra else NONE,
            **numbers,
        }
        for name, column in self._columns.items():
            column.append(row[name])
        if len(self._columns["start"]) > MAX_SPANS:
            half = MAX_SPANS // 2
            for name, column in self._columns.items():
                self._columns[name] = column[half:]
            self._dropped += half

    def window(
        self, start_us: float | None = None, end_us: float | None = None, *, since: int = 0, limit: int
    ) -> dict[str, Any]:
        """At most about `limit` spans that touch the window, of those added after the first `since`.

        Where there are more, neighbours on a lane are merged (`count` says how many, `busy` what they cover of their
        `us`), and of the microgroups every `sampled`-th is there, with all of its stages.
        """
        columns = {name: np.array(column) for name, column in self._columns.items()}
        for column in columns:
            columns[column] = columns[column][max(0, since - self._dropped) :]
        start, end = columns["start"], columns["start"] + columns["us"]
        whole = (float(start.min()), float(end.max())) if len(start) else (0.0, 0.0)
        low, high = whole[0] if start_us is None else start_us, whole[1] if end_us is None else end_us
        touched = np.flatnonzero((end >= low) & (start <= high))
        columns = {name: column[touched] for name, column in columns.items()}
        columns["count"] = np.ones(len(touched), dtype=np.int64)
        columns["busy"] = columns["us"]
        sampled = 1
        if len(touched) > limit:
            stages = columns["lane"] == self._lanes.number("")
            works = _rows(columns, ~stages)
            # An iteration is what people look for, however many there are.
            whole_ones = works["name"] == self._names.number("iteration")
            lanes = _merged(works, (high - low) / _PIXELS, limit // 2, keep=whole_ones)
            parts, sampled = _some(_rows(columns, stages), limit - len(lanes["start"]))
            columns = {name: np.concatenate([lanes[name], parts[name]]) for name in columns}
        return self._answer(columns, whole, sampled)

    def _answer(self, columns: dict[str, np.ndarray], whole: tuple[float, float], sampled: int) -> dict[str, Any]:
        extras = {int(i): json.loads(self._extras.texts[i]) for i in np.unique(columns["extra"]) if i >= 0}
        return {
            "origin_s": self.origin_s,
            "total": len(self),
            "whole": list(whole),
            "sampled": sampled,
            "lanes": self._lanes.texts,
            "names": self._names.texts,
            "extras": extras,
            "columns": {
                # Tenths of a microsecond: the clock of a span tells no more.
                name: (np.round(column, 1) if column.dtype.kind == "f" else column).tolist()
                for name, column in columns.items()
            },
        }


def _rows(columns: Mapping[str, np.ndarray], which: np.ndarray) -> dict[str, np.ndarray]:
    return {name: column[which] for name, column in columns.items()}


def _some(columns: dict[str, np.ndarray], limit: int) -> tuple[dict[str, np.ndarray], int]:
    """Whole microgroups, every k-th as they began, so that at most about `limit` spans stay; and k."""
    count = len(columns["start"])
    if count <= limit:
        return columns, 1
    key = np.stack([columns[name] for name in ("rollout", "group", "index")], axis=1)
    _, first, member = np.unique(key, axis=0, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(columns["start"][first])] = np.arange(len(first))
    every = -(-count // max(1, limit))
    return _rows(columns, order[member.reshape(-1)] % every == 0), every


def _merged(columns: dict[str, np.ndarray], gap_us: float, limit: int, *, keep: np.ndarray) -> dict[str, np.ndarray]:
    """At most about `limit` spans: lanes that have no more than their share stay, of the others spans of one name with
    less than `gap_us` between them are one; a wider gap where too many stay. keep: those that stay in any case."""
    lanes, lane, counts = np.unique(columns["lane"], return_inverse=True, return_counts=True)
    crowded = (counts > limit // max(1, len(lanes)))[lane.reshape(-1)] & ~keep
    if len(columns["start"]) <= limit or not crowded.any():
        return columns
    quiet, rest = _rows(columns, ~crowded), _rows(columns, crowded)
    room = max(1, limit - len(quiet["start"]))
    merged = _joined(rest, gap_us)
    while len(merged["start"]) > room and gap_us < rest["start"].max() - rest["start"].min():
        gap_us *= 4
        merged = _joined(rest, gap_us)
    return {name: np.concatenate([quiet[name], merged[name]]) for name in columns}


def _joined(columns: dict[str, np.ndarray], gap_us: float) -> dict[str, np.ndarray]:
    order = np.lexsort((columns["start"], columns["name"], columns["lane"]))
    rows = _rows(columns, order)
    end = rows["start"] + rows["us"]
    same = (rows["lane"][1:] == rows["lane"][:-1]) & (rows["name"][1:] == rows["name"][:-1])
    # Shifted apart, so that what is the latest end so far is so in each lane and name alone.
    shift = np.concatenate([[0], np.cumsum(~same)]) * (end.max() - rows["start"].min() + 1)
    latest = np.maximum.accumulate(end + shift) - shift
    far = rows["start"][1:] - latest[:-1] > gap_us
    begins = np.flatnonzero(np.concatenate([[True], ~same | far]))
    alone = np.diff(np.append(begins, len(order))) == 1
    merged = {name: column[begins] for name, column in rows.items()}
    for name in (*_NUMBERS, "extra"):
        merged[name] = np.where(alone, merged[name], NONE)
    merged["us"] = np.maximum.reduceat(end, begins) - merged["start"]
    merged["count"] = np.add.reduceat(rows["count"], begins)
    new = np.concatenate([[True], ~same])
    from_us = np.where(new, rows["start"], np.maximum(rows["start"], np.concatenate([[0.0], latest[:-1]])))
    merged["busy"] = np.add.reduceat(np.maximum(0.0, end - from_us), begins)
    return merged
