"""Whether a file has changed, so that who looks at it again and again reads it only then."""

from __future__ import annotations

from pathlib import Path

Stamp = tuple[int, int, int]
"""Number of the file, its bytes, and its time of change in nanoseconds."""


class Stamps:
    """What files looked like when they were last asked about."""

    def __init__(self) -> None:
        self._seen: dict[Path, Stamp | None] = {}

    def changed(self, *paths: Path) -> bool:
        """Whether any of them is new, gone, or another one than at the last call; all are asked about first of all.

        Ask before reading: what is added meanwhile is a change at the next call.
        """
        now = {path: _stamp(path) for path in paths}
        changed = any(path not in self._seen or self._seen[path] != stamp for path, stamp in now.items())
        self._seen |= now
        return changed


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
