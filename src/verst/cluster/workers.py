"""Parsers and reward workers: pools of actors that keep nothing, so that a lost one is simply made again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from verst.cluster.calls import ActorPool
from verst.cluster.comeback import bring_back
from verst.cluster.processes import Processes
from verst.cluster.supervisor import Supervisor, Watched
from verst.errors import ProcessDied


def worker_pool(
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
) -> ActorPool:
    """make: name -> its actor, which `load` makes ready; start_s: that this may take when one comes back."""

    async def replace(index: int, error: ProcessDied) -> Any:
        name = names[index]

        async def end() -> None:
            processes.end(name)

        async def begin() -> Any:
            actor = make(name)
            await processes.know(name)
            await load(actor)
            return actor

        return await bring_back(
            name,
            str(error),
            kind=kind,
            end=end,
            begin=begin,
            start_s=start_s,
            processes=processes,
            supervisor=supervisor,
        )

    actors = [make(name) for name in names]
    pool = ActorPool(actors, role=role, dispatch=dispatch, replace=replace if supervisor.enabled else None)
    for index, name in enumerate(names):
        _watch(pool, index, name, limit_s, limit_key, processes, supervisor)
    return pool


def _watch(
    pool: ActorPool, index: int, name: str, limit_s: float, key: str, processes: Processes, supervisor: Supervisor
) -> None:
    watched = Watched(
        limit_s=limit_s,
        key=key,
        has_work=lambda: pool.has_work(index),
        progress=lambda: pool.num_done(index),
        end=lambda: processes.end(name),
    )
    supervisor.watch(name, watched)
