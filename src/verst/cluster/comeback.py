"""A process in the place of one that ended, again and again until it is there or was lost too often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from verst.cluster.processes import Processes
from verst.cluster.supervisor import Fault, Kind, Supervisor
from verst.errors import EngineError, ProcessDied, StateLost

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Comeback(Generic[T]):
    """How one process comes up and comes back. What it raises: ProcessDied with a diagnosis after too many faults, StateLost
    where the trainer is gone too, and what `begin` raises besides."""

    process: str
    kind: Kind
    begin: Callable[[], Awaitable[T]]
    """Makes a new process of that name and returns when it is ready."""
    end: Callable[[], Awaitable[None]]
    """Makes an end of what is left of the one before."""
    start_s: float
    """That either may take: one that hangs in its start would not say so."""
    processes: Processes
    supervisor: Supervisor
    key: str = "supervision.start_s"
    """That sets the limit."""

    async def up(self, first: Callable[[], Awaitable[T]]) -> T:
        """What `first` returns of the process that is there, or `begin` of another one in its place."""
        try:
            async with asyncio.timeout(self.start_s):
                return await first()
        except StateLost:
            raise
        except (ProcessDied, TimeoutError) as error:
            return await self.back(self._reason(error))

    async def back(self, reason: str) -> T:
        """What `begin` returns. reason: how the one before has ended."""
        started = time.monotonic()
        while True:
            await self.end()
            log = await self.processes.last_lines(self.process)
            self.supervisor.fault(Fault(kind=self.kind, process=self.process, reason=reason, log=log))
            try:
                async with asyncio.timeout(self.start_s):
                    begun = await self.begin()
            except StateLost:
                raise
            except (EngineError, ProcessDied, TimeoutError) as again:
                reason = self._reason(again)
                continue
            self.supervisor.restarted(self.process, seconds=time.monotonic() - started)
            return begun

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            self.supervisor.hangs(self.process, not_there(self.start_s, self.key))
        return str(error)


def not_there(start_s: float, key: str = "supervision.start_s") -> str:
    """What is said of a process that hangs in its start. key: that sets the limit."""
    return f"it was not there after {start_s:g} s ({key})"
