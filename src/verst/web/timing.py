"""When a server did what for one request, in the standard header Server-Timing of its answer.

    server-timing: queue;dur=12.500;start=0.300, ..., total;dur=1002.900, clock;desc="8f3a12c0/51234567890", batch;desc="17"

Milliseconds; `start` (which others ignore) counts from the request's arrival, and `clock` is which clock that was on, and when, in
microseconds. What was done in a batch with other requests bears the batch's number. A server that says nothing is as good,
and so is one that says other things.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

HEADER = "server-timing"
_CLOCK = uuid.uuid4().hex[:8]
"""Name of this process's clock."""
_DRIFT = 5e-5
"""Seconds by which two clocks may part in a second."""


class Stopwatch:
    """Of one request, on the server. All times are `time.perf_counter()`."""

    def __init__(self) -> None:
        self._arrived_s = time.perf_counter()
        self._stages: dict[str, tuple[float, float]] = {}
        self.batch: int | None = None
        """Number of the batch that it was done in."""

    def add(self, stage: str, start_s: float, end_s: float) -> None:
        self._stages[stage] = (start_s, end_s)

    def header(self) -> str:
        """As of now."""
        parts = []
        # Whole microseconds of the clock: what begins when something else ends does so in the header too.
        arrived_us = round(1e6 * self._arrived_s)
        for stage, (start_s, end_s) in self._stages.items():
            start_us, end_us = round(1e6 * start_s), round(1e6 * end_s)
            parts.append(f"{stage};dur={(end_us - start_us) / 1000:.3f};start={(start_us - arrived_us) / 1000:.3f}")
        parts.append(f"total;dur={1000 * (time.perf_counter() - self._arrived_s):.3f}")
        parts.append(f'clock;desc="{_CLOCK}/{arrived_us}"')
        return ", ".join(parts if self.batch is None else [*parts, f'batch;desc="{self.batch}"'])


@dataclass(frozen=True, kw_only=True)
class ServerTimes:
    """What a server says of one request."""

    stages: Mapping[str, tuple[float, float]]
    """stage -> start and end in seconds since the request's arrival."""
    total_s: float
    """From there to the answer's first byte."""
    batch: int | None = None
    clock: str | None = None
    """Name of the clock that it read."""
    arrived_s: float = 0.0
    """On that clock, the request's arrival."""

    @classmethod
    def of(cls, header: str | None) -> ServerTimes | None:
        """None where the header says nothing, or not what ours do."""
        stages: dict[str, tuple[float, float]] = {}
        total_s = batch = clock = None
        arrived_s = 0.0
        try:
            for entry in filter(None, (header or "").split(",")):
                name, *rest = (part.strip() for part in entry.split(";"))
                values = dict(part.split("=", 1) for part in rest)
                if name == "total":
                    total_s = float(values["dur"]) / 1000
                elif name == "batch":
                    batch = int(values["desc"].strip('"'))
                elif name == "clock":
                    clock, arrived_us = values["desc"].strip('"').split("/")
                    arrived_s = int(arrived_us) / 1e6
                elif "start" in values:
                    start_us, dur_us = (round(1000 * float(values[key])) for key in ("start", "dur"))
                    stages[name] = (start_us / 1e6, (start_us + dur_us) / 1e6)
        except (KeyError, ValueError, OverflowError):
            return None
        if total_s is None:
            return None
        return cls(stages=stages, total_s=total_s, batch=batch, clock=clock, arrived_s=arrived_s)


class Clocks:
    """What clocks of servers say, as this process's `time.monotonic()`.

    One exchange tells it as if both ways took as long; the one with the least time on the way is believed for all that
    a clock says, so that what a server did one after the other is so here too.
    """

    def __init__(self) -> None:
        self._best: dict[str, tuple[float, float, float]] = {}
        """Clock -> (what to add to it, time on the way, when that was)."""

    def arrived(self, server: ServerTimes, *, sent_s: float, answered_s: float) -> float:
        """When the request came to the server."""
        middle_s = (sent_s + answered_s - server.total_s) / 2
        if server.clock is None:
            return middle_s
        way_s = answered_s - sent_s - server.total_s
        offset_s, least_s, at_s = self._best.get(server.clock, (0.0, math.inf, answered_s))
        if way_s <= least_s + _DRIFT * (answered_s - at_s):
            offset_s = middle_s - server.arrived_s
            self._best[server.clock] = offset_s, way_s, answered_s
        return server.arrived_s + offset_s


@dataclass(frozen=True, kw_only=True)
class AnswerTimes:
    """When a client sent a request and had its answer, on `time.monotonic()`."""

    sent_s: float
    answered_s: float
    """Status and headers were there."""
    received_s: float
    """All of it was there."""
    server: ServerTimes | None = None
    arrived_s: float = 0.0
    """At the server, where it says something."""

    def stages(self) -> dict[str, tuple[float, float]]:
        """stage -> start and end on the client's clock."""
        if self.server is None:
            return {}

        def here(at_s: float) -> float:
            return min(max(self.arrived_s + at_s, self.sent_s), self.answered_s)

        return {stage: (here(start), here(end)) for stage, (start, end) in self.server.stages.items()}
