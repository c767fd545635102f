"""Engines as processes: one actor each, or one for each of its ranks."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from verst.cluster.actors import EngineActor, EngineRankActor
from verst.cluster.calls import all_of, result_of
from verst.cluster.comeback import Comeback
from verst.cluster.processes import Asked, Processes
from verst.cluster.supervisor import Supervisor, Watched
from verst.config.recipe import RlRecipe
from verst.config.sections import SglangEngine
from verst.errors import ProcessDied
from verst.rollout.pipeline import together
from verst.trainer.topology import Place

_log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineProcesses:
    """The ranks of one engine, as actors. It lives as long as all of them do."""

    def __init__(self, lead: Any, followers: Sequence[Any], *, lost: Callable[[str], None]) -> None:
        """lost: called with the reason when a rank that follows has failed; it ends the engine."""
        self.actors = [lead, *followers]
        self._lead, self._followers, self._lost = lead, list(followers), lost
        self._watch: asyncio.Task[list[Any]] | None = None

    async def start(self, timeout_s: float, loan: Any) -> str:
        """The URL, once all ranks have loaded the model. loan: of a trainer rank, for an engine of one rank.

        Raises what any of them raises.
        """
        if not self._followers:
            url: str = await result_of(self._lead.start.remote(timeout_s, loan), role="engine")
            return url
        host, port = await result_of(self._lead.open.remote(), role="engine")
        roles = ["engine", *(f"engine rank {rank}" for rank in range(1, len(self.actors)))]
        starts = [actor.start.remote(host, port) for actor in self._followers]
        url, *_ = await all_of([self._lead.start.remote(timeout_s, loan), *starts], roles=roles)
        follows = [actor.follow.remote() for actor in self._followers]
        self._watch = asyncio.create_task(all_of(follows, roles=roles[1:]), name="verst-engine-ranks")
        self._watch.add_done_callback(self._ended)
        return url

    def _ended(self, watch: asyncio.Task[list[Any]]) -> None:
        if watch.cancelled() or watch.exception() is None:
            return
        # Rank 0 may wait for the lost one in the middle of a forward, and a GPU waits long.
        _log.error("a rank of an engine ended", exc_info=watch.exception())
        self._lost(str(watch.exception()))

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})


Loan = Callable[[], Awaitable[Any]]
"""Makes the loan of the trainer rank beside an engine; None where nothing is lent."""


class EngineFleet:
    """All engines of a run, each in its place, from the first start to the last restart."""

    def __init__(
        self, recipe: RlRecipe, processes: Processes, supervisor: Supervisor, *, device: str, token: str | None
    ) -> None:
        """token: what engines want to see of their clients."""
        self._recipe, self._processes, self._supervisor = recipe, processes, supervisor
        self._device, self._token = device, token
        self._per_engine = recipe.engine.parallel.ranks
        self._start_s, self._start_key = recipe.supervision.start_s, "supervision.start_s"
        if isinstance(recipe.engine, SglangEngine):
            # The server has its own time, and says itself what came of it; the rest is its adapter's.
            self._start_s += recipe.engine.start_s
            self._start_key += " + engine.start_s"
        self._engines: list[EngineProcesses] = []
        self.has_work: Callable[[int], bool] = lambda index: False
        """Whether something waits for that engine."""
        self.places: list[Place] = []
        """Of all ranks; they come back there or not at all."""
        self._lost_ranks: dict[int, str] = {}

    def make(self) -> None:
        """Their actors, which load nothing yet."""
        self._engines = [self._make(index) for index in range(self._recipe.engine.num)]

    def _make(self, index: int) -> EngineProcesses:
        recipe, device, first = self._recipe, self._device, index * self._per_engine
        spawn = self._processes.spawn
        lead, *others = self.names(index)
        return EngineProcesses(
            spawn(lead, EngineActor, "engine", recipe, index=index, device=device, token=self._token, place=first),
            [
                spawn(name, EngineRankActor, "engine", recipe, rank=rank, device=device, place=first + rank)
                for rank, name in enumerate(others, start=1)
            ],
            lost=lambda reason: self._lose(index, reason),
        )

    def names(self, index: int) -> list[str]:
        """Of its processes, the first rank's first."""
        return [f"engine {index}", *(f"engine {index} rank {rank}" for rank in range(1, self._per_engine))]

    def _lose(self, index: int, reason: str) -> None:
        """A rank is lost, and with it the engine: whoever waits for it shall not wait longer."""
        self._lost_ranks[index] = reason
        self._processes.end(self.names(index)[0])

    @property
    def actors(self) -> list[Any]:
        """All ranks of all engines."""
        return [actor for engine in self._engines for actor in engine.actors]

    @property
    def all_names(self) -> list[str]:
        """In the order of `actors`."""
        return [name for index in range(self._recipe.engine.num) for name in self.names(index)]

    async def arrive(self) -> None:
        """All processes are there, where they will stand, and load nothing yet; one that ends meanwhile comes back.

        Raises ProcessDied with a diagnosis after too many faults.
        """

        async def again(index: int) -> list[Place]:
            self._engines[index] = self._make(index)
            return await self._arrived(index)

        found = await together(
            *(
                self._comeback(index, functools.partial(again, index)).up(functools.partial(self._arrived, index))
                for index in range(self._recipe.engine.num)
            )
        )
        self.places = [place for places in found for place in places]

    async def _arrived(self, index: int) -> list[Place]:
        await self._processes.know(*self.names(index))
        places = [actor.place.remote() for actor in self._engines[index].actors]
        return await all_of(places, roles=self.names(index))

    async def start(self, index: int, loan: Loan) -> str:
        """The URL of an engine that has arrived, or of another one in its place where it ends before it is ready.

        Raises what a rank raises, and as `replace` does.
        """

        async def first() -> str:
            return await self._load(index, await loan())

        return await self._comeback(index, functools.partial(self._begin, index, loan)).up(first)

    async def _load(self, index: int, lent: Any) -> str:
        # Whoever waits for it has less patience, and then it is one that hangs.
        url = await self._engines[index].start(2 * self._start_s, lent)
        watched = Watched(
            limit_s=self._recipe.supervision.engine_s,
            key="supervision.engine_s",
            has_work=lambda: self.has_work(index),
            progress=Asked(self._engines[index].actors[0]),
            end=lambda: self._processes.end(self.names(index)[0]),
        )
        self._supervisor.watch(self.names(index)[0], watched)
        return url

    async def replace(self, index: int, error: Exception, loan: Loan) -> str:
        """The URL of an engine in the place of a lost one.

        Raises ProcessDied with a diagnosis after too many faults, StateLost where the trainer is gone too.
        """
        return await self._comeback(index, functools.partial(self._begin, index, loan)).back(self._why(index, error))

    async def renew(self, index: int, loan: Loan) -> str:
        """The same of an engine without a fault of its own."""
        await self._end(index)
        begin = functools.partial(self._begin, index, loan)
        return await self._comeback(index, begin).up(begin)

    def _comeback(self, index: int, begin: Callable[[], Awaitable[T]]) -> Comeback[T]:
        return Comeback(
            process=self.names(index)[0],
            kind="engine",
            begin=begin,
            end=functools.partial(self._end, index),
            start_s=self._start_s,
            processes=self._processes,
            supervisor=self._supervisor,
            key=self._start_key,
        )

    async def _end(self, index: int) -> None:
        await self._engines[index].close()
        for name in self.names(index):
            self._supervisor.forget(name)
            self._processes.end(name)

    async def _begin(self, index: int, loan: Loan) -> str:
        self._engines[index] = self._make(index)
        self._check_places(index, await self._arrived(index))
        lent = await loan()
        try:
            return await self._load(index, lent)
        except ProcessDied as error:
            raise ProcessDied(self._why(index, error)) from error

    def _why(self, index: int, error: Exception) -> str:
        return f"{error}; {self._lost_ranks.pop(index)}" if index in self._lost_ranks else str(error)

    def _check_places(self, index: int, places: Sequence[Place]) -> None:
        first = index * self._per_engine
        before = self.places[first : first + self._per_engine]
        if list(places) != before and self._recipe.sync.type not in ("collective", "disk"):
            raise ProcessDied(
                f"engine {index} came back at {places[0]}, it was at {before[0]}, and its weights would not reach it there: "
                "use cluster.placement.type = separate or colocated, which keep a place"
            )

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
