"""Alarms and stop rules: pure functions of the metrics so far, so that a resumed run needs nothing but metrics.jsonl.

A row is one line of it: metric name -> value, and `iteration`. A metric that is absent or NaN is no reading, and no
reading never raises anything.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verst.obs.metrics import ITERATION, NON_FINITE

Row = Mapping[str, float]

ROLLED_BACK_TO = "watch/rolled_back_to"
"""Metric of the iteration after which the weights of an earlier one were taken back: that one's number."""


class Alarm(Protocol):
    """What an alarm makes of the rows, the newest last."""

    def reads(self, row: Row) -> bool:
        """This row has a reading."""

    def complaint(self, rows: Sequence[Row]) -> str | None:
        """What is wrong with the reading of the newest row; None where nothing is."""


@dataclass(frozen=True, kw_only=True)
class Raised:
    text: str
    """What is wrong, with the numbers."""
    new: bool
    """It did not stand already at the reading before."""


def raised(alarm: Alarm, rows: Sequence[Row], *, patience: int) -> Raised | None:
    """What the alarm says at the newest row; None where that has no reading, or one of the last `patience` is good."""
    ends = [i + 1 for i, row in enumerate(rows) if alarm.reads(row)][-patience - 1 :]
    if len(ends) < patience or ends[-1] != len(rows):
        return None
    texts = [alarm.complaint(rows[:end]) for end in ends]
    last = texts[-1]
    if last is None or None in texts[-patience:]:
        return None
    return Raised(text=last, new=len(texts) == patience or texts[0] is None)


def from_log(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Rows as `read_metrics` gives them: what was written as null is NaN again."""
    return [
        {key: math.nan if value is None else value for key, value in row.items() if key != NON_FINITE} for row in rows
    ]


def counted(rows: Sequence[Row]) -> list[Row]:
    """The rows that led to the weights of now: without those that a roll back undid."""
    kept: list[Row] = []
    for row in rows:
        kept.append(row)
        if ROLLED_BACK_TO in row:
            kept = [r for r in kept if r[ITERATION] <= row[ROLLED_BACK_TO]]
    return kept


def best(rows: Sequence[Row], metric: str, among: Collection[int] | None = None) -> int | None:
    """The iteration with the largest reading, the first of equal ones; None without a reading. among: iterations."""
    readings = [row for row in rows if _is_read(row, metric) and (among is None or row[ITERATION] in among)]
    return int(max(readings, key=lambda row: row[metric])[ITERATION]) if readings else None


def stop_reason(
    rows: Sequence[Row], metric: str, *, at_least: float | None, no_improvement_for: int | None
) -> str | None:
    """Why the run should end at the newest row; None where it should not, or where that has no reading."""
    if not rows or not _is_read(rows[-1], metric):
        return None
    values = [row[metric] for row in rows if _is_read(row, metric)]
    if at_least is not None and values[-1] >= at_least:
        return f"{metric} is {values[-1]:.4g} and has reached {at_least:g}"
    if no_improvement_for is not None:
        since = len(values) - 1 - values.index(max(values))
        if since >= no_improvement_for:
            return f"{metric} has had no new best for {since} evaluations (best {max(values):.4g})"
    return None


def _is_read(row: Row, metric: str) -> bool:
    return metric in row and math.isfinite(row[metric])


@dataclass(frozen=True, kw_only=True)
class Above:
    """A metric, or its ratio to another one, is above a bound."""

    metric: str
    above: float
    per: str | None = None
    """Metric to divide by; a row where it is 0 is no reading."""

    def reads(self, row: Row) -> bool:
        return _is_read(row, self.metric) and (self.per is None or row.get(self.per, 0) > 0)

    def complaint(self, rows: Sequence[Row]) -> str | None:
        row = rows[-1]
        value = row[self.metric] / (row[self.per] if self.per else 1)
        name = f"{self.metric} / {self.per}" if self.per else self.metric
        return f"{name} is {value:.4g}, above {self.above:g}" if value > self.above else None


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Any metric is NaN or infinite."""

    def reads(self, row: Row) -> bool:
        return True

    def complaint(self, rows: Sequence[Row]) -> str | None:
        names = sorted(name for name, value in rows[-1].items() if not math.isfinite(value))
        return f"not finite: {', '.join(names)}" if names else None


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A metric is many times the median of its last `window` readings."""

    metric: str
    factor: float
    window: int

    def reads(self, row: Row) -> bool:
        return _is_read(row, self.metric)

    def complaint(self, rows: Sequence[Row]) -> str | None:
        *before, value = [row[self.metric] for row in rows if self.reads(row)]
        if len(before) < self.window:
            return None
        median = statistics.median(before[-self.window :])
        if value <= self.factor * median:
            return None
        return f"{self.metric} is {value:.4g}, more than {self.factor:g} times its median {median:.4g}"


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """A metric is below a fraction of its starting value, the mean of its first `start` readings."""

    metric: str
    fraction: float
    start: int

    def reads(self, row: Row) -> bool:
        return _is_read(row, self.metric)

    def complaint(self, rows: Sequence[Row]) -> str | None:
        values = [row[self.metric] for row in rows if self.reads(row)]
        if len(values) <= self.start:
            return None
        first = statistics.fmean(values[: self.start])
        if values[-1] >= self.fraction * first:
            return None
        return f"{self.metric} is {values[-1]:.4g}, below {self.fraction:g} of its starting value {first:.4g}"


@dataclass(frozen=True, kw_only=True)
class Drop:
    """A metric is below its best reading by more than `drop`, or by half of the latest `spread` where that is unset."""

    metric: str
    drop: float | None
    spread: str
    """Metric with a standard deviation in the same unit."""

    def reads(self, row: Row) -> bool:
        return _is_read(row, self.metric)

    def complaint(self, rows: Sequence[Row]) -> str | None:
        values = [row[self.metric] for row in rows if self.reads(row)]
        spreads = [row[self.spread] for row in rows if _is_read(row, self.spread)]
        if self.drop is None and not spreads:
            return None
        allowed = spreads[-1] / 2 if self.drop is None else self.drop
        top = max(values)
        if values[-1] >= top - allowed:
            return None
        return f"{self.metric} is {values[-1]:.4g}, more than {allowed:.4g} below its best {top:.4g}"


@dataclass(frozen=True, kw_only=True)
class Hacking:
    """A gold metric's line falls while the proxy's rises (least squares over the last `window` gold readings)."""

    gold: tuple[str, ...]
    """Any of these metrics."""
    proxy: str
    window: int
    drop: float
    rise: float

    def reads(self, row: Row) -> bool:
        return any(_is_read(row, metric) for metric in self.gold)

    def complaint(self, rows: Sequence[Row]) -> str | None:
        for metric in self.gold:
            readings = [row for row in rows if _is_read(row, metric)][-self.window :]
            if len(readings) < self.window or readings[-1] is not rows[-1]:
                continue
            first = readings[0][ITERATION]
            others = [row for row in rows if row[ITERATION] >= first and _is_read(row, self.proxy)]
            if len(others) < 2:
                continue
            fall, gain = -fitted_change(readings, metric), fitted_change(others, self.proxy)
            if fall > self.drop and gain > self.rise:
                return f"{metric} fell by {fall:.4g} while {self.proxy} rose by {gain:.4g} since iteration {first:.0f}"
        return None


def fitted_change(rows: Sequence[Row], metric: str) -> float:
    """How much the least-squares line of the metric over the iteration changes from the first row to the last."""
    x, y = [float(row[ITERATION]) for row in rows], [row[metric] for row in rows]
    return statistics.linear_regression(x, y).slope * (x[-1] - x[0])
