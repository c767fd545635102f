"""Spans as a trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

A process of the trace is a kind of worker, a thread of it a lane: the driver's phases and rollouts, the trainer, each
engine's device and its requests, parsers, workers of each reward, and the microgroups with their stages. What overlaps
without lying inside each other gets threads beside each other, because the slices of a thread must nest.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verst.obs.spans import DRIVER, ENGINE, HELDOUT, PARSER, TRAINER, Span

Event = dict[str, Any]
Track = tuple[str, str]
"""Kind of worker, and which of them."""
_IN_REQUEST = ("queue", "encode", "denoise", "decode", "ship")
_IN_MICROGROUP = ("engine_wait", "transfer", "deserialize", "parse_wait", "reward", "group_wait")
_FIRST = (DRIVER, "rollouts", TRAINER, ENGINE, PARSER)
"""Kinds in the order in which their tracks are shown; rewards and microgroups follow."""


@dataclass(kw_only=True)
class _Slice:
    """What lies by itself on a thread, and the spans inside it."""

    name: str
    first: Span
    start_s: float
    end_s: float
    inside: list[Span] = field(default_factory=list)

    @classmethod
    def of(cls, span: Span, name: str | None = None) -> _Slice:
        return cls(name=name or span.name, first=span, start_s=span.start_s, end_s=span.end_s)

    def add(self, span: Span) -> None:
        self.inside.append(span)
        self.end_s = max(self.end_s, span.end_s)


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """The trace as one file, in place of an older one only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(trace_events(spans)):
            file.write((",\n" if number else "\n") + json.dumps(event))
        file.write("\n]}\n")
    os.replace(partial, path)


def trace_events(spans: Sequence[Span]) -> Iterator[Event]:
    """spans: sorted as `read_spans` gives them. Times are microseconds since the first."""
    tracks = _tracks(spans)
    origin_us = _us(spans[0].start_s) if spans else 0
    pids = {kind: i + 1 for i, kind in enumerate(sorted({kind for kind, _ in tracks}, key=_order))}
    for kind, pid in pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": kind}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    tid = 0
    for (kind, track), slices in sorted(tracks.items(), key=lambda item: (pids[item[0][0]], item[0][1])):
        for beside, row in enumerate(_nested_rows(slices) if kind == DRIVER else _rows(slices)):
            tid += 1
            name = track if beside == 0 else f"{track} ({beside + 1})"
            yield {"ph": "M", "name": "thread_name", "pid": pids[kind], "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pids[kind], "tid": tid, "args": {"sort_index": tid}}
            for one in row:
                for span, title, end_s in (
                    (one.first, one.name, one.end_s),
                    *((s, s.name, s.end_s) for s in one.inside),
                ):
                    start_us = _us(span.start_s)
                    yield {
                        "ph": "X",
                        "name": title,
                        "cat": span.name,
                        "pid": pids[kind],
                        "tid": tid,
                        "ts": start_us - origin_us,
                        "dur": _us(end_s) - start_us,
                        "args": _arguments(span),
                    }


def _tracks(spans: Sequence[Span]) -> dict[Track, list[_Slice]]:
    tracks: dict[Track, list[_Slice]] = {}
    open_slices: dict[tuple[Any, ...], _Slice] = {}
    """Of microgroups and their requests, the newest of each: a resumed run makes some again."""
    batches: dict[tuple[Any, ...], float] = {}
    """Of what requests share, when it ended."""

    def begin(track: Track, one: _Slice) -> _Slice:
        tracks.setdefault(track, []).append(one)
        return one

    for span in spans:
        name = span.name
        if name == "rollout":
            begin(("rollouts", "rollouts"), _Slice.of(span, f"rollout {span.rollout}"))
        elif name == "generate":
            whole = begin(("microgroups", "microgroups"), _Slice.of(span, _title(span)))
            whole.inside.append(span)
            open_slices[span.microgroup, None] = whole
        elif name == "request":
            open_slices[span.microgroup, span.lane] = begin((_engine(span), "requests"), _Slice.of(span, _title(span)))
        elif name == "reward_wait":
            begin((f"reward {span.more['reward']}", "waiting"), _Slice.of(span, _title(span)))
        elif name in _IN_MICROGROUP and (span.microgroup, None) in open_slices:
            open_slices[span.microgroup, None].add(span)
        elif name in _IN_REQUEST:
            if (span.microgroup, span.lane) in open_slices:
                open_slices[span.microgroup, span.lane].add(span)
            if name != "queue" and _is_first_of_batch(span, batches):
                begin((_engine(span), "device"), _Slice.of(span))
        elif span.lane is not None:
            kind, _, number = span.lane.rpartition(":")
            track = "phases" if kind == DRIVER else f"{kind.removeprefix('reward/')} {number}"
            begin((kind.replace("/", " "), track), _Slice.of(span))
    return tracks


def _is_first_of_batch(span: Span, batches: dict[tuple[Any, ...], float]) -> bool:
    """Else the device did it once, for several requests, and another of them has said so."""
    batch = span.more.get("batch")
    if batch is None or span.name not in ("encode", "denoise"):
        return True
    # Engines that were started anew count from 0 again.
    key = (span.lane, span.name, batch)
    known = span.start_s < batches.get(key, span.start_s)
    batches[key] = span.end_s
    return not known


def _rows(slices: Sequence[_Slice]) -> list[list[_Slice]]:
    """As few rows as can be, in each of which no two slices overlap."""
    rows: list[list[_Slice]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    """(end, row), a heap like `free`."""
    for one in _in_order(slices):
        while busy and busy[0][0] <= _us(one.start_s):
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(rows)
        if row == len(rows):
            rows.append([])
        rows[row].append(one)
        heapq.heappush(busy, (_us(one.end_s), row))
    return rows


def _nested_rows(slices: Sequence[_Slice]) -> list[list[_Slice]]:
    """The same where a slice may also lie inside another one. For few rows."""
    rows: list[tuple[list[_Slice], list[int]]] = []
    for one in _in_order(slices):
        start, end = _us(one.start_s), _us(one.end_s)
        for _, ends in rows:
            while ends and ends[-1] <= start:
                ends.pop()
        fits = [row for row in rows if not row[1] or end <= row[1][-1]]
        if not fits:
            rows.append(([], []))
        row, ends = fits[0] if fits else rows[-1]
        row.append(one)
        ends.append(end)
    return [row for row, _ in rows]


def _in_order(slices: Sequence[_Slice]) -> list[_Slice]:
    return sorted(slices, key=lambda one: (_us(one.start_s), -_us(one.end_s)))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _order(kind: str) -> tuple[int, str]:
    first = kind.split(" ")[0]
    return (_FIRST.index(first) if first in _FIRST else len(_FIRST) + (kind == "microgroups"), kind)


def _engine(span: Span) -> str:
    return str(span.lane).replace(":", " ")


def _title(span: Span) -> str:
    """Rollout, group and first sample of a microgroup, as people write them."""
    rollout = "evaluation" if span.rollout == HELDOUT else span.rollout
    return f"{rollout}:{span.group}.{span.index}"


def _arguments(span: Span) -> Event:
    named = {name: getattr(span, name) for name in ("rollout", "group", "index", "iteration", "error")}
    return {**{name: value for name, value in named.items() if value is not None}, **span.more}
