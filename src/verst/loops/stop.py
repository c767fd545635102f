"""Ctrl-C, or another thread that asks: the first time ends the run at the next safe point, the second at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """A stop was asked for while work was going on that can be thrown away."""


class Asked:
    """What stands in for Ctrl-C where a run is not in the main thread. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hear: Callable[[], None] | None = None
        self.requested = False

    def ask(self) -> None:
        """As Ctrl-C does."""
        with self._lock:
            self.requested = True
            if self._hear is not None:
                self._hear()

    def tell(self, hear: Callable[[], None] | None) -> None:
        """From now on each `ask` calls `hear`, and at once where somebody has asked before; None: nobody hears."""
        with self._lock:
            self._hear = hear
            if hear is not None and self.requested:
                hear()


class StopSignal:
    """Use as a context manager inside a running event loop."""

    def __init__(self, asked: Asked | None = None) -> None:
        """asked: listen to this and not to signals, which reach the main thread alone."""
        self._asked = asked
        self._event = asyncio.Event()
        self._task = asyncio.current_task()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def __enter__(self) -> StopSignal:
        loop = asyncio.get_running_loop()
        if self._asked is not None:

            def hear() -> None:
                loop.call_soon_threadsafe(self._on_signal)

            self._asked.tell(hear)
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        if self._asked is not None:
            self._asked.tell(None)
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._event.is_set() and self._task is not None:
            self._task.cancel()
        self._event.set()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises Interrupted, after cancelling it, as soon as a stop is asked for."""
        job = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({job, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if job.done():
                return job.result()
            raise Interrupted
        finally:
            waiter.cancel()
            if not job.done():
                job.cancel()
                await asyncio.gather(job, return_exceptions=True)
