"""When a server did what for one request, in the standard header Server-Timing of its answer.

    server-timing: queue;dur=12.500;start=0.300, denoise;dur=940.200;start=14.100, total;dur=1002.900, batch;desc="17"

Milliseconds; `start` (which others ignore) counts from the request's arrival. What was done in a batch with other requests
bears the batch's number. A server that says nothing is as good, and so is one that says other things.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

HEADER = "server-timing"


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
        for stage, (start_s, end_s) in self._stages.items():
            # Whole microseconds first: what begins when something else ends does so in the header too.
            start_us, end_us = (round(1e6 * (at_s - self._arrived_s)) for at_s in (start_s, end_s))
            parts.append(f"{stage};dur={(end_us - start_us) / 1000:.3f};start={start_us / 1000:.3f}")
        parts.append(f"total;dur={1000 * (time.perf_counter() - self._arrived_s):.3f}")
        return ", ".join(parts if self.batch is None else [*parts, f'batch;desc="{self.batch}"'])


@dataclass(frozen=True, kw_only=True)
class ServerTimes:
    """What a server says of one request."""

    stages: Mapping[str, tuple[float, float]]
    """stage -> start and end in seconds since the request's arrival."""
    total_s: float
    """From there to the answer's first byte."""
    batch: int | None = None

    @classmethod
    def of(cls, header: str | None) -> ServerTimes | None:
        """None where the header says nothing, or not what ours do."""
        stages: dict[str, tuple[float, float]] = {}
        total_s = batch = None
        try:
            for entry in filter(None, (header or "").split(",")):
                name, *rest = (part.strip() for part in entry.split(";"))
                values = dict(part.split("=", 1) for part in rest)
                if name == "total":
                    total_s = float(values["dur"]) / 1000
                elif name == "batch":
                    batch = int(values["desc"].strip('"'))
                elif "start" in values:
                    start_us, dur_us = (round(1000 * float(values[key])) for key in ("start", "dur"))
                    stages[name] = (start_us / 1e6, (start_us + dur_us) / 1e6)
        except (KeyError, ValueError, OverflowError):
            return None
        return None if total_s is None else cls(stages=stages, total_s=total_s, batch=batch)


@dataclass(frozen=True, kw_only=True)
class AnswerTimes:
    """When a client sent a request and had its answer, on `time.monotonic()`."""

    sent_s: float
    answered_s: float
    """Status and headers were there."""
    received_s: float
    """All of it was there."""
    server: ServerTimes | None = field(default=None)

    def stages(self) -> dict[str, tuple[float, float]]:
        """stage -> start and end on the client's clock.

        The server's clock is another one: the time that it had the request for is put in the middle of the time that
        the client waited, as if both ways took as long.
        """
        if self.server is None:
            return {}
        arrived_s = (self.sent_s + self.answered_s - self.server.total_s) / 2

        def here(at_s: float) -> float:
            return min(max(arrived_s + at_s, self.sent_s), self.answered_s)

        return {stage: (here(start), here(end)) for stage, (start, end) in self.server.stages.items()}
