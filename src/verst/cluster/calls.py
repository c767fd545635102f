"""Waiting for actors: their errors come out as they were raised, a dead process comes out by name."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
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
    """Calls go to the actor with the fewest in flight, or to each in turn."""

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        role: str,
        dispatch: Literal["least_loaded", "round_robin"] = "least_loaded",
    ) -> None:
        self.actors = list(actors)
        self.hosts: tuple[str, ...] = ()
        """Of each actor, after `locate`; until then tensors are copied to them."""
        self._role = role
        self._next = itertools.cycle(range(len(actors))) if dispatch == "round_robin" else None
        self._in_flight = [0] * len(actors)

    async def locate(self) -> None:
        """Ask the actors where they are, so that those of this host map what they are sent."""
        self.hosts = tuple(await all_of([a.host.remote() for a in self.actors], roles=[self._role] * len(self.actors)))

    async def call(self, submit: Callable[[Any], Awaitable[Any]]) -> Any:
        """submit: actor -> object reference."""
        index = (
            min(range(len(self.actors)), key=self._in_flight.__getitem__) if self._next is None else next(self._next)
        )
        self._in_flight[index] += 1
        with to_same_host(bool(self.hosts) and self.hosts[index] == host_identity()):
            sent = submit(self.actors[index])
        job = asyncio.ensure_future(result_of(sent, role=self._role))

        def ended(job: asyncio.Future[Any]) -> None:
            self._in_flight[index] -= 1
            if not job.cancelled():
                job.exception()  # seen, where nobody waits for it any more

        job.add_done_callback(ended)
        # A call that was given up still keeps its actor busy: the next one goes elsewhere.
        return await asyncio.shield(job)
