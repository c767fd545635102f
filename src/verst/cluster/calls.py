"""Waiting for actors: their errors come out as they were raised, a dead process comes out by name."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
import ray.exceptions

from verst.cluster.tensors import to_same_host
from verst.errors import ProcessDied, VerstError
from verst.weights.block import host_identity


async def result_of(ref: Awaitable[Any], *, role: str) -> Any:
    """The value of an actor call. Raises what the actor raised, or ProcessDied naming `role`."""
    try:
        return await ref
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, VerstError):
            raise error.cause from None
        # Ray's own error has the actor's whole traceback as its text: it stays as the cause.
        raise error.cause from error
    except ray.exceptions.OutOfMemoryError as error:
        # Of Ray's own watch over the node's memory, which tells who used how much.
        raise ProcessDied(f"the {role} process was killed, for the node ran low on memory") from error
    except ray.exceptions.RayActorError as error:
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise ProcessDied(f"the {role} process ended or was killed ({reason})") from error


async def all_of(refs: Sequence[Awaitable[Any]], *, roles: Sequence[str]) -> list[Any]:
    """All values, or the first failure at once: the other ranks of a dead one would wait for ever."""
    jobs = [asyncio.ensure_future(result_of(ref, role=role)) for ref, role in zip(refs, roles, strict=True)]
    try:
        return list(await asyncio.gather(*jobs))
    finally:
        for job in jobs:
            job.cancel()


Placed = tuple[Any, str]
"""An actor that is ready, and the identity of its host."""
Replace = Callable[[int, ProcessDied], Awaitable[Placed]]
"""(number, how it ended) -> the actor in its place. Raises what ends the run."""


@dataclass
class _Calls:
    """Of one actor."""

    in_flight: int = 0
    done: int = 0
    replacing: asyncio.Task[Any] | None = None


class ActorPool:
    """Calls go to the actor with the fewest in flight, or to each in turn. One whose actor ends is made again."""

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        role: str,
        dispatch: Literal["least_loaded", "round_robin"] = "least_loaded",
        replace: Replace | None = None,
    ) -> None:
        """replace: None = the end of an actor is that of its calls."""
        self.actors = list(actors)
        self.hosts: tuple[str, ...] = ()
        """Of each actor, after `start`; until then tensors are copied to them."""
        self._role = role
        self._replace = replace
        self._next = itertools.cycle(range(len(actors))) if dispatch == "round_robin" else None
        self._calls = [_Calls() for _ in actors]

    def has_work(self, index: int) -> bool:
        return self._calls[index].in_flight > 0

    def num_done(self, index: int) -> int:
        """Calls of this actor that have ended."""
        return self._calls[index].done

    async def start(self, ready: Callable[[int, Any], Awaitable[Placed]]) -> None:
        """From now on those of this host map what they are sent. ready: (number, actor) -> it, or another one in its place."""
        placed = await asyncio.gather(*(ready(index, actor) for index, actor in enumerate(self.actors)))
        self.actors, self.hosts = [actor for actor, _ in placed], tuple(host for _, host in placed)

    async def call(self, submit: Callable[[Any], Awaitable[Any]], *, timeout_s: float | None = None) -> Any:
        """submit: actor -> object reference. timeout_s: that an actor has for it, while one that comes back has its own.

        Raises TimeoutError, what the actor raises, or what `replace` does.
        """
        while True:
            index = self._choose()
            actor = self.actors[index]
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._submitted(index, submit)
            except ProcessDied as error:
                if self._replace is None:
                    raise
                if self.actors[index] is actor:
                    await self._replaced(index, error, self._replace)

    def _choose(self) -> int:
        if self._next is not None:
            return next(self._next)
        # An actor that is coming back is asked where all are.
        return min(range(len(self.actors)), key=lambda i: (self._is_down(i), self._calls[i].in_flight))

    def _is_down(self, index: int) -> bool:
        replacing = self._calls[index].replacing
        return replacing is not None and not replacing.done()

    async def _submitted(self, index: int, submit: Callable[[Any], Awaitable[Any]]) -> Any:
        calls = self._calls[index]
        calls.in_flight += 1
        with to_same_host(bool(self.hosts) and self.hosts[index] == host_identity()):
            sent = submit(self.actors[index])
        job = asyncio.ensure_future(result_of(sent, role=f"{self._role} {index}"))

        def ended(job: asyncio.Future[Any]) -> None:
            calls.in_flight -= 1
            calls.done += 1
            if not job.cancelled():
                job.exception()  # seen, where nobody waits for it any more

        job.add_done_callback(ended)
        # A call that was given up still keeps its actor busy: the next one goes elsewhere.
        return await asyncio.shield(job)

    async def _replaced(self, index: int, error: ProcessDied, replace: Replace) -> None:
        """Once for all calls that the actor took with it, whoever gives up meanwhile."""
        calls = self._calls[index]
        if not self._is_down(index):

            async def put() -> None:
                self.actors[index], host = await replace(index, error)
                if self.hosts:
                    self.hosts = (*self.hosts[:index], host, *self.hosts[index + 1 :])

            calls.replacing = asyncio.ensure_future(put())
        assert calls.replacing is not None
        await asyncio.shield(calls.replacing)
