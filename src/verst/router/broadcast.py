"""What all engines must hear: new weights, memory given up and taken back, checksums.

    hold requests back from the engines in service ─> wait until they have none ─> ask all at once ─> compare ─> go on

The report is of all or nothing: success means that every engine in service did it and that they agree. Engines that did
not are named; what they hold is unknown then, and they get no request until a probe or another update says what it is.
Nothing is undone at those that did it: weights of two versions never meet in a batch, because versions are part of routing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from verst.errors import EngineError, RequestError
from verst.router.dispatch import Dispatcher
from verst.router.pool import Member, Pool
from verst.router.prober import Prober
from verst.router.upstream import explain, message_of, record_of

UPDATES = ("/update_weights_from_manifest", "/update_weights_from_disk")
"""New weights, whose version the answers say."""
MEMORY = ("/release_memory_occupation", "/resume_memory_occupation")
QUESTIONS = ("/get_weights_checksum",)
REFUSED = ("/update_weights_from_tensor", "/update_weights_from_tensor_checker")
"""Whole weights in one request, which the router would have to hold for all engines."""


@dataclass(frozen=True, kw_only=True)
class _Reply:
    member: Member
    status: int
    """HTTP; 0 = there was no answer."""
    said: Any
    """Its JSON record, or the reason."""

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300


class Unequal(EngineError):
    """Not all engines did what was asked (HTTP 502). The message names those that did not."""


class Broadcaster:
    """Used on one event loop."""

    def __init__(
        self, pool: Pool, dispatcher: Dispatcher, prober: Prober, http: httpx.AsyncClient, *, timeout_s: float
    ) -> None:
        """timeout_s: for one engine's answer, and for the requests before it."""
        self._pool, self._dispatcher, self._prober, self._http = pool, dispatcher, prober, http
        self._timeout_s = timeout_s
        self._one_at_a_time = asyncio.Lock()

    async def send(self, path: str, body: bytes) -> dict[str, Any]:
        """What all engines in service answer. Raises RequestError where all refuse, Unequal, EngineError for none."""
        if body or path in UPDATES:
            record_of(body)
        async with self._one_at_a_time:
            members = self._pool.begin_update()
            if not members:
                raise EngineError(f"no engine is in service: {self._pool.why_none_serves()}")
            known = {member: member.version for member in members}
            try:
                await self._until_idle(members)
                replies = await asyncio.gather(*(self._ask(member, path, body) for member in members))
                return self._report(path, replies, known)
            finally:
                for member in members:
                    # Only where nothing was sent.
                    if member.updating:
                        self._pool.end_update(member, version=known[member])
                await asyncio.gather(*(self._prober.probe(member) for member in members))
                self._dispatcher.weights_changed()

    async def _until_idle(self, members: Sequence[Member]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                for member in members:
                    await self._dispatcher.idle(member)
        except TimeoutError:
            busy = ", ".join(f"{member.url} ({member.in_flight})" for member in members if member.in_flight)
            raise EngineError(f"engines still had requests after {self._timeout_s:g} s: {busy}") from None

    async def _ask(self, member: Member, path: str, body: bytes) -> _Reply:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.post(
                    f"{member.url}{path}", content=body, headers={"content-type": "application/json"}
                )
        except TimeoutError:
            return _Reply(member=member, status=0, said=f"did not answer in {self._timeout_s:g} s")
        except httpx.TransportError as error:
            return _Reply(member=member, status=0, said=explain(error))
        if not response.is_success:
            return _Reply(member=member, status=response.status_code, said=message_of(response))
        try:
            return _Reply(member=member, status=response.status_code, said=record_of(response.content))
        except RequestError:
            return _Reply(member=member, status=0, said="answered what is no JSON record")

    def _report(self, path: str, replies: Sequence[_Reply], known: dict[Member, int | None]) -> dict[str, Any]:
        bad = [reply for reply in replies if not reply.good]
        for reply in replies:
            # A refusal (4xx) changed nothing.
            held = known[reply.member] if path not in UPDATES or 400 <= reply.status < 500 else _version(reply)
            self._pool.end_update(reply.member, version=held)
        if bad:
            reasons = "; ".join(f"{reply.member.url}: {reply.said}" for reply in bad)
            if len(bad) == len(replies) and all(400 <= reply.status < 500 for reply in bad):
                raise RequestError(reasons)
            raise Unequal(f"{path}: {len(bad)} of {len(replies)} engines did not: {reasons}")
        first = replies[0].said
        for reply in replies[1:]:
            if _compared(path, reply.said) != _compared(path, first):
                raise Unequal(
                    f"{path}: {reply.member.url} answered {_compared(path, reply.said)}, "
                    f"{replies[0].member.url} {_compared(path, first)}"
                )
        if path in UPDATES and (version := _version(replies[0])) is not None:
            self._pool.handed_out(version)
        if path in QUESTIONS:
            return dict(first)
        return {**first, "engines": {reply.member.url: reply.said for reply in replies}}


def _version(reply: _Reply) -> int | None:
    version = reply.said.get("weight_version") if reply.good else None
    return version if isinstance(version, int) else None


def _compared(path: str, said: Any) -> Any:
    """What must be the same everywhere."""
    if path in UPDATES:
        return {name: said.get(name) for name in ("weight_version", "certificate")}
    return said if path in QUESTIONS else None
