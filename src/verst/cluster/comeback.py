"""A process in the place of one that ended, again and again until it is there or was lost too often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from verst.cluster.processes import Processes
from verst.cluster.supervisor import Fault, Kind, Supervisor
from verst.errors import EngineError, ProcessDied, StateLost

T = TypeVar("T")


async def bring_back(
    process: str,
    reason: str,
    *,
    kind: Kind,
    end: Callable[[], Awaitable[None]],
    begin: Callable[[], Awaitable[T]],
    start_s: float,
    processes: Processes,
    supervisor: Supervisor,
) -> T:
    """What `begin` returns of the new one, within `start_s` seconds. end: makes an end of what is left of the one before.

    Raises ProcessDied with a diagnosis after too many faults, StateLost where the trainer is gone too.
    """
    started = time.monotonic()
    while True:
        await end()
        log = await processes.last_lines(process)
        supervisor.fault(Fault(kind=kind, process=process, reason=reason, log=log))
        try:
            # One that hangs in its start would not say so.
            async with asyncio.timeout(start_s):
                begun = await begin()
        except StateLost:
            raise
        except (EngineError, ProcessDied, TimeoutError) as again:
            reason = str(again) or f"it was not there after {start_s:g} s (supervision.start_s)"
            continue
        supervisor.restarted(process, seconds=time.monotonic() - started)
        return begun
