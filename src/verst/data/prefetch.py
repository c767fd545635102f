"""Batches made ahead by a thread, handed over in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """`make(step)` for step = first, first + 1, ..., `ahead` of them before they are asked for. Use as a context manager.

    One thread makes one after another, so what they leave behind has the order of the steps, whatever the timing. What
    `make` raises is raised by the `get` of that step. With ahead = 0 there is no thread.
    """

    def __init__(self, make: Callable[[int], T], *, first: int, last: int, ahead: int) -> None:
        """last: the step after the last one that is made."""
        self._make = make
        self._next, self._last = first, last
        self._ahead = ahead
        self._waiting: deque[Future[T]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verst-prefetch") if ahead else None

    def __enter__(self) -> Prefetcher[T]:
        for _ in range(self._ahead):
            self._submit()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def get(self) -> T:
        """The next batch. Raises what making it raised."""
        if self._thread is None:
            self._next += 1
            return self._make(self._next - 1)
        batch = self._waiting.popleft().result()
        self._submit()
        return batch

    def _submit(self) -> None:
        if self._thread is not None and self._next < self._last:
            self._waiting.append(self._thread.submit(self._make, self._next))
            self._next += 1
