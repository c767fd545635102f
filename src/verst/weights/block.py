"""A block of memory that two processes of one host map, and that no crash can leak.

On Linux it is a memfd: it has no name, and the kernel frees it when its last holder is gone, however that ended.
The receiver opens it through the sender's entry in /proc. Elsewhere it is a temporary file.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import re
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from verst.errors import SyncError

_PREFIX = "verst-"
"""Of the names of all blocks."""
_HANDLE = re.compile(r"/proc/\d+/fd/\d+")


class SharedBlock:
    """Writable on the side that makes it; `close` frees it once receivers have closed theirs."""

    def __init__(self, nbytes: int, *, name: str = "verst-weights") -> None:
        """name: what /proc shows it as, beginning with "verst-"."""
        self._path: str | None = None
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create(name)
            self.handle = f"/proc/{os.getpid()}/fd/{self.fd}"
        else:
            self.fd, self._path = tempfile.mkstemp(prefix=f"{name}-")
            self.handle = self._path
        try:
            os.ftruncate(self.fd, nbytes)
            self._map = mmap.mmap(self.fd, nbytes)
        except OSError:
            self._leave_file()
            raise
        self.nbytes = nbytes
        self.bytes: Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)
        """[nbytes] uint8 view of the block."""

    def close(self) -> None:
        """No tensor may show the block any more."""
        self.bytes = None
        self._map.close()
        self._leave_file()

    def leave(self) -> None:
        """Nobody can open the block any more; its memory stays as long as tensors show it."""
        self.bytes = None
        self._leave_file()

    def _leave_file(self) -> None:
        os.close(self.fd)
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)


def host_identity() -> str:
    """Processes of equal identity can open each other's blocks, if they are one user's."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname(), platform.system()]
    parts += [boot.read_text().strip()] if boot.exists() else []
    # Blocks are opened through /proc, which shows the processes of one pid namespace only.
    parts += [os.readlink(space)] if space.is_symlink() else []
    return " ".join(parts)


@contextmanager
def open_block(handle: str, nbytes: int) -> Iterator[Tensor]:
    """The block behind `handle` as [nbytes] uint8. Tensors made from it must not outlive the block.

    Raises SyncError when it is gone, or is not ours to read.
    """
    mapped = _map(handle, nbytes, writable=True)
    view = torch.frombuffer(mapped, dtype=torch.uint8)
    try:
        yield view
    finally:
        del view
        mapped.close()


def map_block(handle: str, nbytes: int) -> Tensor:
    """The same for reading only, mapped as long as a tensor made from it lives. A write ends the process."""
    mapped = _map(handle, nbytes, writable=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def open_handle(handle: str, flags: int) -> int:
    """The file descriptor of a SharedBlock of another process.

    Handles come over the network. Raises OSError for one that is gone, and for one that opens anything else.
    """
    if not hasattr(os, "memfd_create"):
        path = Path(handle)
        if path.parent != Path(tempfile.gettempdir()) or not path.name.startswith(_PREFIX):
            raise OSError(errno.EINVAL, "it is no block of ours", handle)
        return os.open(handle, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    if _HANDLE.fullmatch(handle) is None:
        raise OSError(errno.EINVAL, "it is no block of ours", handle)
    fd = os.open(handle, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_PREFIX}"):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no block of ours", handle)
    return fd


def _map(handle: str, nbytes: int, *, writable: bool) -> mmap.mmap:
    try:
        fd = open_handle(handle, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        raise SyncError(
            f"the sender's memory {handle} cannot be opened ({error.strerror}): the sender has ended, or engine and "
            "trainer do not share a host, a user and a process namespace"
        ) from error
    try:
        if os.fstat(fd).st_size != nbytes:
            raise SyncError(f"the sender's memory {handle} holds {os.fstat(fd).st_size} bytes, announced were {nbytes}")
        return mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(fd)
