"""Ctrl-C: the first one ends the run at the next safe point, the second at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """A stop was asked for while work was going on that can be thrown away."""


class StopSignal:
    """Use as a context manager inside a running event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._task = asyncio.current_task()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def __enter__(self) -> StopSignal:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
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
