"""Pooled blocks of shared memory: one process writes an answer once, the others of its host map it.

A block is a memfd: it has no name, so nothing is left of it when its last holder is gone, however that ended. Who
still reads a block is known to the kernel alone: every holder keeps a shared lock (flock) on a file description of its
own, which its mapping holds open, and a block is written again only under the exclusive lock. So there are no counts
that a killed process could leave wrong. What is handed over but not opened yet is told apart by the block's header:

    free (we hold the exclusive lock) ─take─> written ─grant─> granted ─opened, all unmapped─> free
                                                                  └─never opened for `unclaimed_s`─> free

An opener locks first and compares the generation then, so that it can never read what another answer overwrote.
"""

from __future__ import annotations

import bisect
import errno
import fcntl
import math
import mmap
import os
import resource
import struct
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verst.errors import EngineError
from verst.weights.block import SharedBlock, open_handle

HEADER_BYTES = 4096
"""A page in front of the data, which stays page-aligned."""
ALIGNMENT = 64
_HEADER = struct.Struct("<8s16sQQ")
"""magic, id, generation, generation that was opened last"""
_MAGIC = b"verst-bl"
_OPENED_AT = _HEADER.size - 8
_GRAIN = 64 * 2**10
_LOOKS = 32
"""Granted blocks that are looked at for one that is free again."""


class BlockHandle(NamedTuple):
    """Where a process of the same host finds what was granted."""

    path: str
    """In /proc, of the process that owns the block."""
    block: str
    """Hex id, since a number of a process or a file may come again."""
    generation: int
    nbytes: int
    """Of the data."""


class TensorHandle(NamedTuple):
    """A tensor inside a block."""

    block: BlockHandle
    offset: int
    """Bytes into the data."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """As torch prints it."""


def supported() -> bool:
    """Whether this system has blocks that cannot be left behind."""
    return hasattr(os, "memfd_create")


def allows_more_files() -> bool:
    """Whether blocks, own ones and mapped ones, leave a quarter of the open files that this process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each is open twice: by itself and by its mapping.
    return limit == resource.RLIM_INFINITY or 2 * (len(_owned) + len(_mapped)) < limit * 3 // 4


class Block:
    """One block of a pool, on the side that owns it."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.generation = 0
        self.granted_at: float | None = None
        """None: nobody else can open it."""
        self._id = uuid.uuid4()
        self._shared = SharedBlock(HEADER_BYTES + capacity, name="verst-rollout")
        self._device = device
        assert self._shared.bytes is not None
        _owned.add(self)
        self._address = self._shared.bytes.data_ptr()
        fcntl.flock(self._shared.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if device.type == "cuda":
            _check_cuda(torch.cuda.cudart().cudaHostRegister(self._address, HEADER_BYTES + capacity, 0), "register")

    @property
    def data(self) -> Tensor:
        """[capacity] uint8, page-locked where the device is a GPU."""
        assert self._shared.bytes is not None
        return self._shared.bytes[HEADER_BYTES:]

    def begin(self) -> None:
        """A new generation; only while it is ours alone."""
        self.generation += 1
        os.pwrite(self._shared.fd, _HEADER.pack(_MAGIC, self._id.bytes, self.generation, 0), 0)

    def grant(self, nbytes: int, now: float) -> BlockHandle:
        """Let others open it: who has the handle can, until it is taken back."""
        self.granted_at = now
        fcntl.flock(self._shared.fd, fcntl.LOCK_UN)
        return BlockHandle(self._shared.handle, self._id.hex, self.generation, nbytes)

    def take_back(self, *, unopened: bool) -> bool:
        """Make it ours alone if nobody holds it; unopened: also if nobody has opened it yet."""
        opened = struct.unpack("<Q", os.pread(self._shared.fd, 8, _OPENED_AT))[0] == self.generation
        if not opened and not unopened:
            return False
        try:
            fcntl.flock(self._shared.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.granted_at = None
        return True

    def close(self) -> None:
        if self._device.type == "cuda":
            _check_cuda(torch.cuda.cudart().cudaHostUnregister(self._address), "unregister")
        self._shared.close()
        _owned.discard(self)


class BlockPool:
    """At most `max_bytes` of blocks, made when they are needed and used again. For any thread."""

    def __init__(
        self,
        max_bytes: int,
        *,
        device: torch.device | str = "cpu",
        unclaimed_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """device: blocks are page-locked for it where it is a GPU. unclaimed_s: a grant that nobody opens lasts."""
        self._max_bytes = max_bytes
        self._device = torch.device(device)
        self._unclaimed_s = unclaimed_s
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: list[Block] = []
        self._free: list[Block] = []
        """Ours alone, and not being written."""
        self._granted: deque[Block] = deque()
        """Those that were not looked at for longest come first."""
        self.num_bytes = 0
        """Of all blocks."""
        self.num_refused = 0
        """Times that there was no room."""

    @property
    def num_held(self) -> int:
        """Blocks that are being written or read."""
        with self._lock:
            for _ in range(len(self._granted)):
                self._look()
            return len(self._blocks) - len(self._free)

    def take(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes` to write into; None where the bound leaves no room. `grant` or `put_back` it.

        Looks at a few granted blocks whether they are free again, however many there are: all get their turn.
        """
        with self._lock:
            block = self._fitting(nbytes, most=2 * nbytes)
            for _ in range(min(_LOOKS, len(self._granted))):
                if block is not None:
                    break
                self._look()
                block = self._fitting(nbytes, most=2 * nbytes)
            block = block or self._new(nbytes) or self._fitting(nbytes)
            if block is None:
                self.num_refused += 1
                return None
            self._free.remove(block)
            block.begin()
            return block

    def grant(self, block: Block, nbytes: int) -> BlockHandle:
        """The block is written and may be opened."""
        with self._lock:
            self._granted.append(block)
            return block.grant(nbytes, self._clock())

    def put_back(self, block: Block) -> None:
        """Nobody was told of the block, or nobody shall open it any more."""
        with self._lock:
            if block.granted_at is None:
                self._free.append(block)
            elif block.take_back(unopened=True):
                self._granted.remove(block)
                self._free.append(block)

    def close(self) -> None:
        """Holders keep what they have opened."""
        with self._lock:
            for block in self._blocks:
                block.close()
            self._blocks, self._free = [], []
            self._granted.clear()
            self.num_bytes = 0

    def _look(self) -> None:
        """At the next of the granted blocks: is it free?"""
        block = self._granted.popleft()
        assert block.granted_at is not None
        unclaimed = self._clock() - block.granted_at > self._unclaimed_s
        (self._free if block.take_back(unopened=unclaimed) else self._granted).append(block)

    def _fitting(self, nbytes: int, *, most: int | None = None) -> Block | None:
        """The smallest free one."""
        top = math.inf if most is None else max(most, _GRAIN)
        fitting = [block for block in self._free if nbytes <= block.capacity <= top]
        return min(fitting, key=lambda block: block.capacity, default=None)

    def _new(self, nbytes: int) -> Block | None:
        """Free blocks of other sizes make room for it. None too where too many files are open."""
        capacity = _rounded(nbytes)
        if self.num_bytes - sum(block.capacity for block in self._free) + capacity > self._max_bytes:
            return None
        while self.num_bytes + capacity > self._max_bytes:
            oldest = self._free.pop(0)
            self._blocks.remove(oldest)
            self.num_bytes -= oldest.capacity
            oldest.close()
        if not allows_more_files():
            return None
        block = Block(capacity, self._device)
        self._blocks.append(block)
        self._free.append(block)
        self.num_bytes += capacity
        return block


@dataclass(frozen=True)
class _Mapped:
    handle: BlockHandle
    """Through this process."""
    start: int
    """Address of the data."""
    memory: weakref.ref[mmap.mmap]


_mapped: dict[tuple[str, int], _Mapped] = {}
"""What this process holds now, by block and generation; an entry goes with its mapping."""
_starts: list[tuple[int, tuple[str, int]]] = []
"""(address of the data, key) of the same, by address."""
_owned: weakref.WeakSet[Block] = weakref.WeakSet()
"""All blocks that this process made and has not closed."""
_mapping = threading.RLock()
# Held again where a mapping ends, and its entry with it, while another is made.


def open_block(handle: BlockHandle) -> Tensor:
    """[nbytes] uint8, of which every view holds the block. Writing into it changes this process's copy alone.

    Raises EngineError when the block is gone or was taken back.
    """
    memory = _memory_of(handle)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES, count=handle.nbytes)


def handle_of(tensor: Tensor) -> TensorHandle | None:
    """How another process of this host can map the tensor; None where it does not lie in a block."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    start, size = tensor.data_ptr(), tensor.element_size()
    last = start + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) * size + size
    with _mapping:
        place = bisect.bisect(_starts, start, key=lambda found: found[0]) - 1
        entry = _mapped.get(_starts[place][1]) if place >= 0 else None
    if entry is None or last > entry.start + entry.handle.nbytes:
        return None
    offset, dtype = start - entry.start, str(tensor.dtype).removeprefix("torch.")
    return TensorHandle(entry.handle, offset, tuple(tensor.shape), tuple(tensor.stride()), dtype)


def open_tensor(handle: TensorHandle) -> Tensor:
    """The tensor as a view of the mapped block. Raises EngineError like `open_block`."""
    dtype: torch.dtype = getattr(torch, handle.dtype)
    count = 1 + sum((n - 1) * step for n, step in zip(handle.shape, handle.stride, strict=True))
    offset = HEADER_BYTES + handle.offset
    flat = torch.frombuffer(_memory_of(handle.block), dtype=dtype, offset=offset, count=count)
    return flat.as_strided(handle.shape, handle.stride)


def _memory_of(handle: BlockHandle) -> mmap.mmap:
    key = (handle.block, handle.generation)
    with _mapping:
        entry = _mapped.get(key)
        memory = None if entry is None else entry.memory()
        if memory is None:
            memory, fd = _map(handle)
            start = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() + HEADER_BYTES
            # Through this process, so that others can open it as long as it is held here: the owner may be gone by then.
            own = handle._replace(path=f"/proc/{os.getpid()}/fd/{fd}")
            _mapped[key] = _Mapped(own, start, weakref.ref(memory, lambda ref: _forget(key, start, fd, ref)))
            bisect.insort(_starts, (start, key))
    return memory


def _forget(key: tuple[str, int], start: int, fd: int, memory: weakref.ref[mmap.mmap]) -> None:
    os.close(fd)
    with _mapping:
        if key in _mapped and _mapped[key].memory is memory:
            del _mapped[key]
        place = bisect.bisect_left(_starts, (start, key))
        if place < len(_starts) and _starts[place] == (start, key):
            del _starts[place]


def _map(handle: BlockHandle) -> tuple[mmap.mmap, int]:
    """The mapping, and the descriptor behind it."""
    gone = f"the shared memory {handle.path} of an answer"
    try:
        fd = open_handle(handle.path, os.O_RDWR)
    except OSError as error:
        raise _unopened(gone, error) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EngineError(f"{gone} was taken back before it was opened") from None
        header = os.pread(fd, _HEADER.size, 0)
        size = os.fstat(fd).st_size
        if len(header) < _HEADER.size or size < HEADER_BYTES + handle.nbytes:
            raise EngineError(f"{gone} holds {size} bytes, announced were {HEADER_BYTES + handle.nbytes}")
        magic, block, generation, _ = _HEADER.unpack(header)
        if (magic, block.hex(), generation) != (_MAGIC, handle.block, handle.generation):
            raise EngineError(f"{gone} is of another answer by now")
        os.pwrite(fd, struct.pack("<Q", generation), _OPENED_AT)
        # Private: readers share the pages, and a reader that writes gets pages of its own. The mapping keeps the lock.
        try:
            return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE), fd
        except OSError as error:
            raise _unopened(gone, error) from error
    except (EngineError, OSError):
        os.close(fd)
        raise


def _unopened(gone: str, error: OSError) -> EngineError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        why = "each answer that is held is two open files: raise `ulimit -n`, or make fewer and larger microgroups"
    else:
        why = "its engine has ended, or is not of this host, user and process namespace"
    return EngineError(
        f'{gone} cannot be opened ({error.strerror}): {why}; rollout.transport = "msgpack" needs none of it'
    )


def _rounded(nbytes: int) -> int:
    """Up to an eighth more, so that answers of nearly equal size share blocks."""
    grain = max(_GRAIN, 1 << max(0, nbytes.bit_length() - 4))
    return max(1, -(-nbytes // grain)) * grain


def _check_cuda(status: object, what: str) -> None:
    code = int(status)  # type: ignore[call-overload]
    if code != 0:
        raise EngineError(f"CUDA cannot {what} shared memory for the device (cudaError {code})")
