"""metrics.jsonl: one line an iteration, the source of every curve. Names are documented in docs/metrics.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from verst.errors import InvariantError
from verst.obs.json_lines import Kind, drop_torn_line, keep_rows, read_rows

ITERATION = "iteration"
_KEYS: Mapping[str, Kind] = {ITERATION: int}
NON_FINITE = "non_finite"
"""Key under which a line lists the metrics whose value was NaN or infinite; the value itself is null."""


class MetricsLog:
    """Appends to a metrics.jsonl; every line is on its way to the disk before `append` returns.

    A half-written last line, left by a killed process, is dropped when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        """Creates the file and its folder where they are missing. Raises CheckpointError for a damaged file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        drop_torn_line(path)
        rows = read_metrics(path)
        self._last: int | None = rows[-1][ITERATION] if rows else None
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def append(self, iteration: int, values: Mapping[str, float]) -> None:
        """One line. Raises InvariantError when this iteration, or a later one, is there already."""
        if self._last is not None and iteration <= self._last:
            raise InvariantError(
                f"{self._path} already holds iteration {self._last}, so {iteration} cannot be appended; "
                "a resumed run must call truncate_after first"
            )
        self._file.write(json.dumps(_row(iteration, values), allow_nan=False) + "\n")
        self._file.flush()
        self._last = iteration

    def truncate_after(self, iteration: int) -> None:
        """Drop the lines of later iterations: a run resumed at `iteration` makes them again."""
        self._file.close()
        kept = keep_rows(self._path, _KEYS, lambda row: row[ITERATION] <= iteration)
        self._last = kept[-1][ITERATION] if kept else None
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines, oldest first; a last line that is still being written is left out, a missing file is empty.

    Raises CheckpointError, with file:line, for a line that is not one of ours.
    """
    return read_rows(path, _KEYS)


def series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Iterations that have a finite value of this metric, and the values."""
    points = [(row[ITERATION], float(row[name])) for row in rows if row.get(name) is not None]
    return [x for x, _ in points], [y for _, y in points]


def mean_of_finite(values: Any) -> float:
    """Over the finite ones; NaN where there is none."""
    array = np.asarray(values, dtype=np.float64)
    finite = array[np.isfinite(array)]
    return float(finite.mean()) if len(finite) else float("nan")


def _row(iteration: int, values: Mapping[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {ITERATION: iteration}
    non_finite = []
    for name, value in values.items():
        number = value if isinstance(value, int) else float(value)  # float: numpy scalars are no JSON
        if not math.isfinite(number):
            non_finite.append(name)
        row[name] = number if math.isfinite(number) else None
    if non_finite:
        row[NON_FINITE] = non_finite
    return row
