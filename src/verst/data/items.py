"""What a source names: files on disk or inside a tar, and the items that they make up."""

from __future__ import annotations

import functools
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from verst.errors import DataError

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi")
SOUNDS = (".wav", ".flac", ".mp3", ".ogg", ".m4a")


@dataclass(frozen=True, kw_only=True)
class FileRef:
    """The bytes of one file: all of `path`, or a member of a tar."""

    path: Path
    name: str
    """For people, and the same on every machine: relative to the source, `shard.tar:0007.jpg` inside a tar."""
    offset: int = 0
    size: int | None = None
    """Bytes from `offset` on; None = the whole file."""

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix.lower()

    def open(self) -> BinaryIO:
        """A seekable stream. Raises DataError."""
        try:
            return self.path.open("rb") if self.size is None else io.BytesIO(self.read())
        except OSError as error:
            raise DataError(f"cannot be opened: {error.strerror or error}") from None

    def read(self) -> bytes:
        """Raises DataError for a file that is gone or shorter than the tar says."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(-1 if self.size is None else self.size)
        except OSError as error:
            raise DataError(f"cannot be opened: {error.strerror or error}") from None
        if self.size is not None and len(data) < self.size:
            raise DataError(f"has {len(data)} of its {self.size} bytes: {self.path.name} is cut short")
        return data

    def digest(self) -> str:
        """SHA-256 of the bytes. Raises DataError."""
        try:
            stat = self.path.stat()
        except OSError as error:
            raise DataError(f"cannot be opened: {error.strerror or error}") from None
        return _digest(self, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=65536)
def _digest(ref: FileRef, mtime_ns: int, num_bytes: int) -> str:
    """Once for each state of a file as the file system tells it."""
    del mtime_ns, num_bytes
    return hashlib.sha256(ref.read()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing to learn from."""

    key: str
    """Unique in its source; for people and for the order."""
    caption: str
    media: tuple[FileRef, ...]
    """One picture or clip; of preferences two, the chosen one first."""
    audio: FileRef | None = None
    """Sound outside the clip."""
    image: FileRef | None = None
    """Condition image."""
