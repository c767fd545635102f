"""Looks at every engine, again and again: one task each, so that one that hangs keeps no other one waiting."""

from __future__ import annotations

import asyncio
import logging

import httpx

from verst.router.dispatch import Dispatcher
from verst.router.pool import Member, Pool
from verst.router.upstream import look

_log = logging.getLogger(__name__)
_SOONEST_S = 0.05
"""Between two probes of an engine, however many requests want to know more."""


class Prober:
    """Used on one event loop. It follows the engines of `pool` as they come and go."""

    def __init__(
        self, pool: Pool, dispatcher: Dispatcher, http: httpx.AsyncClient, *, every_s: float, timeout_s: float
    ) -> None:
        self._pool, self._dispatcher, self._http = pool, dispatcher, http
        self._every_s, self._timeout_s = every_s, timeout_s
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._soon: dict[Member, asyncio.Event] = {}

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self.follow()
                await self._dispatcher.wanting.wait()
                self._dispatcher.wanting.clear()
                for event in self._soon.values():
                    event.set()
        finally:
            for task in self._tasks.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values())

    def follow(self) -> None:
        """Begin to look at engines that are new."""
        for member in self._pool.members.values():
            if member not in self._tasks:
                self._soon[member] = asyncio.Event()
                self._tasks[member] = asyncio.create_task(self._watch(member), name=f"verst-router-{member.url}")

    async def probe(self, member: Member) -> None:
        """One look, now."""
        before, version = member.state, member.version
        self._pool.probed(member, await look(self._http, member.url, timeout_s=self._timeout_s))
        if member.state != before:
            _log.warning("%s is %s (%s)", member.url, member.state, member.reason or f"was {before}")
        if member.version != version:
            self._dispatcher.weights_changed()
        else:
            self._dispatcher.changed()

    async def _watch(self, member: Member) -> None:
        soon = self._soon[member]
        try:
            while self._pool.members.get(member.url) is member:
                await self.probe(member)
                await asyncio.sleep(min(_SOONEST_S, self._every_s))
                try:
                    async with asyncio.timeout(self._every_s):
                        await soon.wait()
                except TimeoutError:
                    continue
                soon.clear()
        finally:
            self._tasks.pop(member, None)
            self._soon.pop(member, None)
