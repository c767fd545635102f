"""What happened when: spans (with a duration) and events of a run as JSON lines, on one clock.

A line is `{"time_s": <Unix seconds>, "name": ..., <attributes>}`; a span adds `duration_s`, and `error` when it ended
in an exception. Times come from the monotonic clock, anchored once, so that they never run backwards.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from verst.obs.json_lines import Kind, drop_torn_line, read_rows

Attribute = str | int | float | bool | None
_KEYS: Mapping[str, Kind] = {"time_s": float | int, "name": str}
_ANCHOR_S = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds on this process's clock."""
    return _ANCHOR_S + time.monotonic()


def unix(monotonic_s: float) -> float:
    """The same of a `time.monotonic()`."""
    return _ANCHOR_S + monotonic_s


class EventLog:
    """Appends events to `path`; safe to call from several threads.

    Bounded: a file that has reached `max_bytes` becomes `<stem>.old<suffix>`, in place of the one before it.
    """

    def __init__(self, path: Path, *, max_bytes: int = 64 * 2**20, flush_s: float = 0.0) -> None:
        """flush_s: lines that are younger than this may be lost with the process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        self._flush_s = flush_s
        self._lock = threading.Lock()
        drop_torn_line(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._size = path.stat().st_size
        self._flushed_s = time.monotonic()

    def event(self, name: str, **attributes: Attribute) -> None:
        """Something that happened now."""
        self._write({"time_s": now(), "name": name, **attributes})

    def add_span(self, name: str, *, start_s: float, end_s: float, **attributes: Attribute) -> None:
        """Something that took time; both ends from `now()`."""
        self._write({"time_s": start_s, "name": name, "duration_s": round(end_s - start_s, 6), **attributes})

    def flush(self) -> None:
        """What was written is on its way to the disk."""
        with self._lock:
            self._file.flush()
            self._flushed_s = time.monotonic()

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _write(self, record: dict[str, Attribute]) -> None:
        line = json.dumps(record) + "\n"
        with self._lock:
            if self._size >= self._max_bytes:
                self._file.close()
                os.replace(self._path, _older(self._path))
                self._file = self._path.open("a", encoding="utf-8")
                self._size = 0
            self._file.write(line)
            self._size += len(line)
            if time.monotonic() - self._flushed_s >= self._flush_s:
                self._file.flush()
                self._flushed_s = time.monotonic()


def read_events(path: Path) -> list[dict[str, Any]]:
    """What an EventLog wrote to `path`, oldest first, as far as it is kept; a last line that is still being written is
    left out, missing files are empty.

    Raises CheckpointError, with file:line, for a line that is not one of ours.
    """
    return [event for file in (_older(path), path) for event in read_rows(file, _KEYS)]


def _older(path: Path) -> Path:
    return path.with_name(f"{path.stem}.old{path.suffix}")
