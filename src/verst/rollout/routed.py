"""The router of a run as its driver uses it: samples are asked for through it, weights go to the engines themselves.

    there ─request fails, router is lost─> coming ─another one that was told of the engines─> there

Which engines it may use, and what they hold, it knows from `tell` alone. It is looked at again and again: what it answers is
its progress, which engines have work, and which of them it has put aside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from verst.engine.client import EngineClient
from verst.engine.wire import Answer, GenerateRequest
from verst.errors import EngineError


class RouterOwner(Protocol):
    """Whoever owns the router's process."""

    async def replace(self, error: EngineError) -> EngineClient:
        """The client of a router in its place, which knows no engine. Raises what ends the run."""


class Route:
    """The way to all engines through one router. A request that is lost with a router is made again through the next."""

    def __init__(self, client: EngineClient, *, owner: RouterOwner | None = None, look_s: float = 0.5) -> None:
        """owner: None = the failure of the router is that of the request. look_s: between two looks at it."""
        self.client = client
        self._owner, self._look_s = owner, look_s
        self._coming: asyncio.Task[None] | None = None
        self._told: tuple[Sequence[str], int | None] = ((), None)
        self._agreed: EngineClient | None = None
        self._rows: Mapping[str, Mapping[str, Any]] = {}
        self.transport = ""
        """How answers travel, and why; known when it has been told of engines."""
        self.in_flight = 0
        """Requests for samples."""
        self.num_asked = 0
        """Other questions that it has not answered yet."""
        self.num_heard = 0
        """Times that it has answered anything."""
        self.num_reissued = 0
        """Requests that were lost with a router."""

    @property
    def has_work(self) -> bool:
        return self.in_flight + self.num_asked > 0

    def works(self, engine: str) -> bool:
        """Whether that engine had requests of ours at the last look."""
        return bool(self._rows.get(engine, {}).get("in_flight"))

    async def generate(self, request: GenerateRequest, *, weight_version: int | None) -> Answer:
        """Raises what the client raises, and what the router's owner does."""
        while True:
            client = await self._there()
            self.in_flight += 1
            try:
                return await client.generate(request, weight_version=weight_version)
            except EngineError as error:
                failure = error
            finally:
                self.in_flight -= 1
                self.num_heard += 1
            if not await self._is_lost(client, failure):
                raise failure
            self.num_reissued += 1

    async def tell(self, engines: Sequence[str], *, weight_version: int | None) -> None:
        """These are the engines that may be asked, and all hold this version (None = whatever each says).

        Raises EngineError, what the router's owner raises, and ConfigError where answers cannot travel as the recipe says.
        """
        self._told = (engines, weight_version)
        while True:
            client = await self._there()
            try:
                return await self._instruct(client)
            except EngineError as error:
                failure = error
            if not await self._is_lost(client, failure):
                raise failure

    async def watch(self, put_aside: Callable[[str, str], Awaitable[None]]) -> None:
        """Until cancelled. put_aside: hears the URL of an engine that cannot be asked any more, and why."""
        while True:
            await asyncio.sleep(self._look_s)
            try:
                rows = await self.client.engines()
            except EngineError:
                # Whoever waits for it hears of its end; until then it has not answered.
                self._rows = {}
                continue
            self.num_heard += 1
            self._rows = {row["url"]: row for row in rows}
            for row in rows:
                # One that only does not answer in time may be at work: that is a hang where it makes no progress.
                if row["state"] in ("quarantined", "starting") and not row["silent"] and row["url"] in self._told[0]:
                    await put_aside(row["url"], row["reason"])

    async def _instruct(self, client: EngineClient) -> None:
        engines, weight_version = self._told
        # One that has only just come, and that nobody else can ask yet, may hang as well.
        self.num_asked += 1
        try:
            await client.put_engines(engines, weight_version=weight_version)
            if engines and self._agreed is not client:
                self.transport = await client.negotiate()
                self._agreed = client
        finally:
            self.num_asked -= 1
        self.num_heard += 1

    async def _there(self) -> EngineClient:
        if self._coming is not None:
            await asyncio.shield(self._coming)
        return self.client

    async def _is_lost(self, client: EngineClient, error: EngineError) -> bool:
        """Whether that failure is the end of the router; then another one is on its way, or there."""
        if self.client is not client:
            return True
        # Where an engine has spoken, the router has passed it on.
        if self._owner is None or error.engine is not None or await client.live():
            return self.client is not client
        if self.client is client and (self._coming is None or self._coming.done()):
            self._coming = asyncio.create_task(self._replace(self._owner, error), name="verst-router-replaced")
        return True

    async def _replace(self, owner: RouterOwner, error: EngineError) -> None:
        lost, self._rows = self.client, {}
        while True:
            client = await owner.replace(error)
            try:
                await self._instruct(client)
            except EngineError as again:
                await client.close()
                error = again
                continue
            self.client = client
            await lost.close()
            return

    async def close(self) -> None:
        if self._coming is not None and not self._coming.done():
            self._coming.cancel()
            await asyncio.wait({self._coming})
        await self.client.close()
