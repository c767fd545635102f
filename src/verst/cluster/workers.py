"""Parsers and reward workers: pools of actors that keep nothing, so that a lost one is simply made again."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from verst.cluster.calls import ActorPool, Placed
from verst.cluster.comeback import Comeback
from verst.cluster.processes import Processes
from verst.cluster.supervisor import Supervisor, Watched
from verst.errors import ProcessDied


class Workers:
    """Those of one role. `start` before the first call of their `pool`."""

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[[str], Any],
        *,
        role: str,
        kind: Literal["parser", "reward"],
        load: Callable[[Any], Awaitable[Any]],
        limit_s: float,
        limit_key: str,
        start_s: float,
        processes: Processes,
        supervisor: Supervisor,
        dispatch: Literal["least_loaded", "round_robin"] = "least_loaded",
    ) -> None:
        """make: name -> its actor, which `load` makes ready; start_s: that this may take; limit_s: one call."""
        self._names, self._make, self._load, self._kind = names, make, load, kind
        self._start_s, self._processes, self._supervisor = start_s, processes, supervisor
        replace = self._replace if supervisor.enabled else None
        self.pool = ActorPool([make(name) for name in names], role=role, dispatch=dispatch, replace=replace)
        for index in range(len(names)):
            self._watch(index, limit_s, limit_key)

    async def start(self) -> None:
        """All of them are ready, or others in their places. Raises ProcessDied with a diagnosis, and what loading raises."""
        await self.pool.start(self._up)

    async def _up(self, index: int, actor: Any) -> Placed:
        return await self._comeback(self._names[index]).up(functools.partial(self._ready, self._names[index], actor))

    async def _replace(self, index: int, error: ProcessDied) -> Placed:
        return await self._comeback(self._names[index]).back(str(error))

    def _comeback(self, name: str) -> Comeback[Placed]:
        async def begin() -> Placed:
            return await self._ready(name, self._make(name))

        async def end() -> None:
            self._processes.end(name)

        return Comeback(
            process=name,
            kind=self._kind,
            begin=begin,
            end=end,
            start_s=self._start_s,
            processes=self._processes,
            supervisor=self._supervisor,
        )

    async def _ready(self, name: str, actor: Any) -> Placed:
        await self._processes.know(name)
        await self._load(actor)
        return actor, self._processes.host(name)

    def _watch(self, index: int, limit_s: float, key: str) -> None:
        watched = Watched(
            limit_s=limit_s,
            key=key,
            has_work=lambda: self.pool.has_work(index),
            progress=lambda: self.pool.num_done(index),
            end=lambda: self._processes.end(self._names[index]),
        )
        self._supervisor.watch(self._names[index], watched)
