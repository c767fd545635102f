"""Ctrl-C: the first one ends the work at hand, the second everything."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from loop_fixtures import on_a_loop

from verst.errors import EngineError
from verst.loops.stop import Asked, Interrupted, StopSignal


@on_a_loop
async def test_first_signal_ends_the_work_at_hand() -> None:
    cancelled = asyncio.Event()

    async def long_work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # clean-up is waited for
            cancelled.set()
            raise

    async def result() -> int:
        return 7

    with StopSignal() as stop:
        assert await stop.unless_stopped(result()) == 7
        assert not stop.requested
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            await stop.unless_stopped(long_work())
        assert stop.requested
        assert cancelled.is_set()


@on_a_loop
async def test_second_signal_ends_at_once_and_handlers_are_put_back() -> None:
    async def run() -> None:
        with StopSignal():
            loop = asyncio.get_running_loop()
            loop.call_soon(os.kill, os.getpid(), signal.SIGTERM)
            loop.call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(run())
    assert signal.getsignal(signal.SIGTERM) == before


@on_a_loop
async def test_failure_of_the_work_is_not_hidden_by_the_stop_signal() -> None:
    async def fails() -> None:
        raise EngineError("gone")

    with StopSignal() as stop, pytest.raises(EngineError, match="gone"):
        await stop.unless_stopped(fails())


@on_a_loop
async def test_another_thread_asks_in_place_of_a_signal() -> None:
    async def long_work() -> None:
        await asyncio.Event().wait()

    asked, before = Asked(), signal.getsignal(signal.SIGINT)
    with StopSignal(asked) as stop:
        assert signal.getsignal(signal.SIGINT) == before
        thread = threading.Timer(0.01, asked.ask)
        thread.start()
        with pytest.raises(Interrupted):
            await stop.unless_stopped(long_work())
    thread.join()
    asked.ask()  # nobody hears it any more
    with StopSignal(asked) as late:
        await asyncio.sleep(0)
        assert late.requested
