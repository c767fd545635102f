"""Requests that wait for an engine: a bounded queue before the pool, in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from verst.errors import VerstError
from verst.router.pool import Member, Pool, Shape
from verst.web.terms import Terms


class Full(VerstError):
    """Too many requests wait already (HTTP 503)."""


class Never(VerstError):
    """No engine will take the request as it is (HTTP 409)."""


class Late(VerstError):
    """No engine was there in the request's time (HTTP 503)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Waiting:
    shape: Shape
    terms: Terms
    member: asyncio.Future[Member]


class Dispatcher:
    """Hands engines of `pool` to requests. Used on one event loop."""

    def __init__(self, pool: Pool, *, queue_size: int) -> None:
        self._pool = pool
        self._queue_size = queue_size
        self._queue: deque[_Waiting] = deque()
        self._idle: dict[Member, asyncio.Event] = {}
        self.wanting = asyncio.Event()
        """Set when a request waits for weights or engines that may be there already, unseen."""

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def check_room(self) -> None:
        """Raises Full."""
        if len(self._queue) >= self._queue_size:
            raise Full(f"{self._queue_size} requests are waiting already (--queue-size)")

    async def take(self, shape: Shape, terms: Terms, *, until: float) -> Member:
        """An engine for the request, who must say `done` or `put_back`. until: in the loop's own time.

        Raises Full, Never, Late.
        """
        self._check_possible(terms)
        # Nobody who waits could have it: they would have got it when it became free.
        if (member := self._pool.choose(shape, terms)) is not None:
            return member
        self.check_room()
        item = _Waiting(shape=shape, terms=terms, member=asyncio.get_running_loop().create_future())
        self._queue.append(item)
        self.wanting.set()
        try:
            async with asyncio.timeout_at(until):
                return await item.member
        except TimeoutError:
            self._leave(item)
            raise Late(f"no engine for {terms} in the request's time: {self._pool.why_none(terms)}") from None
        except BaseException:
            self._leave(item)
            raise

    def done(self, member: Member, shape: Shape, *, problem: str | None = None, at_once: bool = False) -> None:
        """The request has left the engine; see Pool.done."""
        self._pool.done(member, shape, problem=problem, at_once=at_once)
        self.changed()

    def put_back(self, member: Member, shape: Shape) -> None:
        """See Pool.put_back."""
        self._pool.put_back(member, shape)
        self.changed()

    def refused(self, member: Member, shape: Shape) -> None:
        """The engine had no room for the request."""
        self._pool.refused(member, shape)
        self.wanting.set()
        self.changed()

    def changed(self) -> None:
        """Engines have room that had none: requests that wait may go."""
        for member, idle in self._idle.items():
            if member.in_flight == 0:
                idle.set()
        for item in list(self._queue):
            if not self._pool.has_room:
                return
            found = self._pool.choose(item.shape, item.terms)
            if found is not None:
                self._queue.remove(item)
                item.member.set_result(found)

    def weights_changed(self) -> None:
        """Engines hold other weights than before: requests that wait may go, or never will."""
        for item in list(self._queue):
            problem = self._pool.never(item.terms)
            if problem is not None:
                self._queue.remove(item)
                item.member.set_exception(Never(problem))
        self.changed()

    async def idle(self, member: Member) -> None:
        """Returns when the engine, which gets no more requests meanwhile, has none."""
        if member.in_flight == 0:
            return
        event = self._idle.setdefault(member, asyncio.Event())
        try:
            await event.wait()
        finally:
            self._idle.pop(member, None)

    def _check_possible(self, terms: Terms) -> None:
        problem = self._pool.never(terms)
        if problem is not None:
            raise Never(problem)

    def _leave(self, item: _Waiting) -> None:
        if item in self._queue:
            self._queue.remove(item)
        elif item.member.done() and not item.member.cancelled() and item.member.exception() is None:
            # Handed over in the moment of giving up.
            self.put_back(item.member.result(), item.shape)
