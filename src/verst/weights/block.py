"""A block of memory that two processes of one host map, and that no crash can leak.

On Linux it is a memfd: it has no name, and the kernel frees it when its last holder is gone, however that ended.
The receiver opens it through the sender's entry in /proc. Elsewhere it is a temporary file.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from verst.errors import SyncError


class SharedBlock:
    """Writable on the side that makes it; `close` frees it once receivers have closed theirs."""

    def __init__(self, nbytes: int) -> None:
        self._path: str | None = None
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("verst-weights")
            self.handle = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            self._fd, self._path = tempfile.mkstemp(prefix="verst-weights-")
            self.handle = self._path
        os.ftruncate(self._fd, nbytes)
        self._map = mmap.mmap(self._fd, nbytes)
        self.nbytes = nbytes
        self.bytes: Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)
        """[nbytes] uint8 view of the block."""

    def close(self) -> None:
        self.bytes = None
        self._map.close()
        os.close(self._fd)
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)


@contextmanager
def open_block(handle: str, nbytes: int) -> Iterator[Tensor]:
    """The block behind `handle` as [nbytes] uint8. Tensors made from it must not outlive the block.

    Raises SyncError when it is gone, or is not ours to read.
    """
    try:
        fd = os.open(handle, os.O_RDWR)
    except OSError as error:
        raise SyncError(
            f"the sender's memory {handle} cannot be opened ({error.strerror}): the sender has ended, or engine and "
            "trainer do not share a host, a user and a process namespace"
        ) from error
    try:
        if os.fstat(fd).st_size != nbytes:
            raise SyncError(f"the sender's memory {handle} holds {os.fstat(fd).st_size} bytes, announced were {nbytes}")
        mapped = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    view = torch.frombuffer(mapped, dtype=torch.uint8)
    try:
        yield view
    finally:
        del view
        mapped.close()
