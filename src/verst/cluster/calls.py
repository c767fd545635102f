"""Waiting for actors: their errors come out as they were raised, a dead process comes out by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
import ray.exceptions

from verst.errors import ProcessDied, VerstError


async def result_of(ref: Awaitable[Any], *, role: str) -> Any:
    """The value of an actor call. Raises what the actor raised, or ProcessDied naming `role`."""
    try:
        return await ref
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, VerstError):
            raise error.cause from None
        # Ray's own error has the actor's whole traceback as its text: it stays as the cause.
        raise error.cause from error
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


class ActorPool:
    """Calls go to the actor with the fewest in flight."""

    def __init__(self, actors: Sequence[Any], *, role: str) -> None:
        self.actors = list(actors)
        self._role = role
        self._in_flight = [0] * len(actors)

    async def call(self, submit: Callable[[Any], Awaitable[Any]]) -> Any:
        """submit: actor -> object reference."""
        index = min(range(len(self.actors)), key=self._in_flight.__getitem__)
        self._in_flight[index] += 1
        job = asyncio.ensure_future(result_of(submit(self.actors[index]), role=self._role))

        def ended(job: asyncio.Future[Any]) -> None:
            self._in_flight[index] -= 1
            if not job.cancelled():
                job.exception()  # seen, where nobody waits for it any more

        job.add_done_callback(ended)
        # A call that was given up still keeps its actor busy: the next one goes elsewhere.
        return await asyncio.shield(job)
