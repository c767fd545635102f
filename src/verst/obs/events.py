"""What happened when: spans (with a duration) and events of a run as JSON lines, on one clock.

A line is `{"time_s": <Unix seconds>, "name": ..., <attributes>}`; a span adds `duration_s`, and `error` when it ended
in an exception. Times come from the monotonic clock, anchored once, so that they never run backwards.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

Attribute = str | int | float | bool | None


class EventLog:
    """Appends events to `path`; safe to call from several threads.

    Bounded: a file that has reached `max_bytes` becomes `<stem>.old<suffix>`, in place of the one before it.
    """

    def __init__(self, path: Path, *, max_bytes: int = 64 * 2**20) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._anchor_s = time.time() - time.monotonic()
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)
        self._size = path.stat().st_size

    def now(self) -> float:
        """Unix seconds on the log's clock."""
        return self._anchor_s + time.monotonic()

    def event(self, name: str, **attributes: Attribute) -> None:
        """Something that happened now."""
        self._write({"time_s": self.now(), "name": name, **attributes})

    def add_span(self, name: str, *, start_s: float, end_s: float, **attributes: Attribute) -> None:
        """Something that took time; both ends from `now()`."""
        self._write({"time_s": start_s, "name": name, "duration_s": end_s - start_s, **attributes})

    @contextmanager
    def span(self, name: str, **attributes: Attribute) -> Iterator[None]:
        """Measures its body; an exception is recorded by its type and goes on."""
        start_s = self.now()
        try:
            yield
        except BaseException as error:
            self.add_span(name, start_s=start_s, end_s=self.now(), **attributes, error=type(error).__name__)
            raise
        self.add_span(name, start_s=start_s, end_s=self.now(), **attributes)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _write(self, record: dict[str, Attribute]) -> None:
        line = json.dumps(record) + "\n"
        with self._lock:
            if self._size >= self._max_bytes:
                self._file.close()
                os.replace(self._path, self._path.with_name(f"{self._path.stem}.old{self._path.suffix}"))
                self._file = self._path.open("a", encoding="utf-8", buffering=1)
                self._size = 0
            self._file.write(line)
            self._size += len(line)
