"""Where the time of a run goes: spans of microgroups, workers and the driver, on the driver's clock.

A span with a lane is work, done by an engine, a parser, a reward worker, the trainer or the driver. One without is a stage
that a microgroup goes through, or a wait in it. docs/tracing.md has the names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verst.obs.events import Attribute, EventLog, read_events, unix
from verst.obs.stage_times import StageTimes

ENGINE, PARSER, TRAINER, DRIVER = "engine", "parser", "trainer", "driver"
"""Kinds of lanes; those of a reward's workers are `reward/<name>`."""
HELDOUT = -1
"""Number that stands for a rollout in the keys and the spans of held-out samples."""
FILE = "spans.jsonl"
"""In a run's folder `events`."""
STARTED = "started"
"""Event in it: a process of the run began."""

_NOTHING: Mapping[str, Attribute] = MappingProxyType({})
_here: ContextVar[Mapping[str, Attribute]] = ContextVar("verst_spans", default=_NOTHING)


def lane_of(kind: str, number: int) -> str:
    """Where work is done: the number-th engine, parser or worker."""
    return f"{kind}:{number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    name: str
    start_s: float
    """Unix seconds on the driver's clock."""
    end_s: float
    lane: str | None = None
    """`<kind>:<number>` of who worked; None for stages and waits."""
    rollout: int | None = None
    """From 0; -1 in an evaluation."""
    group: int | None = None
    """In the rollout; in an evaluation the prompt."""
    index: int | None = None
    """Of the microgroup's first sample in its group."""
    iteration: int | None = None
    """From 1; of the driver's phases."""
    error: str | None = None
    """Type of the exception that ended it."""
    more: Mapping[str, Attribute] = field(default_factory=dict)
    """What else was said: `samples`, `reward`, `batch`, `bytes`, `dropped_by`."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def kind(self) -> str | None:
        """Of the lane."""
        return None if self.lane is None else self.lane.rpartition(":")[0]

    @property
    def microgroup(self) -> tuple[int, int, int] | None:
        """(rollout, group, index); None for what is of no single one."""
        if self.rollout is None or self.group is None or self.index is None:
            return None
        return self.rollout, self.group, self.index


_FIELDS = ("lane", "rollout", "group", "index", "iteration", "error")


def read_spans(run: Path, *, newest: bool = False) -> list[Span]:
    """Of a run folder, by their start; of a long run those that are kept. Raises CheckpointError for a damaged file.

    newest: of the process alone that was started last: its recipe may be another one.
    """
    events = read_events(run / "events" / FILE)
    if newest:
        events = events[max((i for i, event in enumerate(events) if event["name"] == STARTED), default=0) :]
    events = [event for event in events if "duration_s" in event]
    return sorted((_span(event) for event in events), key=lambda span: (span.start_s, -span.end_s))


def _span(event: dict[str, Any]) -> Span:
    start_s = event.pop("time_s")
    known = {name: event.pop(name) for name in _FIELDS if name in event}
    end_s = round(start_s + event.pop("duration_s"), 6)
    return Span(name=event.pop("name"), start_s=start_s, end_s=end_s, **known, more=event)


class Spans:
    """Takes down spans. Everything in a run has the same one; where nobody listens, one without a log.

    All times are `time.monotonic()` of the driver.
    """

    def __init__(self, log: EventLog | None = None, *, capacity: Mapping[str, int] | None = None) -> None:
        """capacity: kind -> its lanes, those that never get work included."""
        self._log = log
        self._times = StageTimes(capacity or {})

    def add(self, name: str, *, start_s: float, end_s: float, lane: str | None = None, **attributes: Attribute) -> None:
        """A span that is over; with what `of` says here."""
        said = {**_here.get(), **attributes}
        self._times.add(name, start_s, end_s, lane=lane, attributes=said)
        if self._log is not None:
            where = {} if lane is None else {"lane": lane}
            start_s, end_s = round(unix(start_s), 6), round(unix(end_s), 6)
            self._log.add_span(name, start_s=start_s, end_s=end_s, **where, **said)

    @contextmanager
    def span(self, name: str, *, lane: str | None = None, **attributes: Attribute) -> Iterator[None]:
        """Measures its body; an exception is recorded by its type and goes on."""
        start_s = time.monotonic()
        try:
            yield
        except BaseException as error:
            end_s = time.monotonic()
            self.add(name, start_s=start_s, end_s=end_s, lane=lane, **attributes, error=type(error).__name__)
            raise
        self.add(name, start_s=start_s, end_s=time.monotonic(), lane=lane, **attributes)

    def metrics(self) -> dict[str, float]:
        """Of the stages and lanes since the last call of this; see docs/metrics.md."""
        return self._times.metrics()

    def longest_stage_s(self, rollout: int) -> float:
        """Of a rollout that is complete; see StageTimes. Once."""
        return self._times.longest_s(rollout)


@contextmanager
def of(**attributes: Attribute) -> Iterator[None]:
    """Spans that are added inside, and in tasks that are begun there, say this too."""
    token = _here.set({**_here.get(), **attributes})
    try:
        yield
    finally:
        _here.reset(token)
