"""JSON lines of a file that another process appends to, rotates or writes anew."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any


class Tail:
    """What has been added since the last look.

    A file that reaches its bound becomes `<stem>.old<suffix>` (`obs.events.EventLog`); its rest is read before the new
    one. Any other file in the old one's place, or a shorter one, was written anew: everything before it is void.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._old = path.with_name(f"{path.stem}.old{path.suffix}")
        self._file: IO[bytes] | None = None
        self._rest = b""
        """The beginning of a line whose end is not there yet."""
        self.num_damaged = 0
        """Whole lines that are no JSON objects; they are left out."""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(rows added, whether all rows before them are void)."""
        if self._file is None:
            rows = self._whole(self._old)
            self._file = self._open()
            return rows + self._added(), False
        now = _stat(self._path)
        mine = os.fstat(self._file.fileno())
        if now is not None and now.st_ino != mine.st_ino:
            rotated = _stat(self._old)
            if rotated is not None and rotated.st_ino == mine.st_ino:
                rows = self._added()
                self._reopen()
                return rows + self._added(), False
            self._reopen()
            return self._added(), True
        if mine.st_size < self._file.tell():
            self._file.seek(0)
            self._rest = b""
            return self._added(), True
        return self._added(), False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes] | None:
        try:
            return self._path.open("rb")
        except FileNotFoundError:
            return None

    def _reopen(self) -> None:
        self.close()
        self._file, self._rest = self._open(), b""

    def _added(self) -> list[dict[str, Any]]:
        if self._file is None:
            return []
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return self._parse(lines)

    def _whole(self, path: Path) -> list[dict[str, Any]]:
        return self._parse(path.read_bytes().split(b"\n")[:-1]) if path.exists() else []

    def _parse(self, lines: list[bytes]) -> list[dict[str, Any]]:
        rows = []
        for line in lines:
            try:
                row = json.loads(line, parse_constant=lambda _: None)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            elif line.strip():
                self.num_damaged += 1
        return rows


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
