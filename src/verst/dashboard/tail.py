"""JSON lines of a file that another process appends to, rotates or writes anew."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

PIECE_BYTES = 8 * 2**20
"""Read at once: a file has up to 64 MiB, and its rows take several times that in memory."""


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
        self.behind = False
        """There may be more to read already."""
        self.num_damaged = 0
        """Whole lines that are no JSON objects; they are left out."""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(rows added, at most a piece of the file; whether all rows before them are void)."""
        if self._file is None:
            self._open_first()
        if self._file is None:
            return [], False
        rows = self._added()
        if self.behind:
            return rows, False
        mine, now = os.fstat(self._file.fileno()), _stat(self._path)
        if now is None or now.st_ino == mine.st_ino:
            if mine.st_size >= self._file.tell():
                return rows, False
            self._file.seek(0)
            self._rest = b""
            return self._added(), True
        rotated = _stat(self._old)
        self.close()
        if rotated is not None and rotated.st_ino == mine.st_ino:
            self._file = _open(self._path)
            return rows + self._added(), False
        self._open_first()
        return self._added(), True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def _open_first(self) -> None:
        self._file = _open(self._old) or _open(self._path)

    def _added(self) -> list[dict[str, Any]]:
        if self._file is None:
            return []
        piece = self._file.read(PIECE_BYTES)
        self.behind = len(piece) == PIECE_BYTES
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return self._parse(lines)

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


def _open(path: Path) -> IO[bytes] | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
