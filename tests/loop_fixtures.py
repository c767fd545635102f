"""Async tests."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Coroutine
from typing import Any


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock starts at 0 and jumps to what is due next: nothing waits, and times are exact.

    For coroutines that wait for timers and each other alone: no threads, no sockets.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        really = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            assert timeout is not None, "everything waits, and nothing is due"
            self._now += timeout
            return really(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on a loop of its own with a virtual clock."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def calls_in(work: Callable[[], Any]) -> int:
    """Function calls, Python's and C's, that it takes: a measure of work that no other process disturbs."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
