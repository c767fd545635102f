"""How engines and trainer ranks come back."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from verst.cluster.actors import TrainerActor
from verst.cluster.engines import EngineFleet
from verst.cluster.hand_over import HandOver
from verst.cluster.processes import Asked, Processes
from verst.cluster.supervisor import Fault, Supervisor, Watched
from verst.cluster.trainers import TrainerGroup
from verst.config.placement import ColocatedPlacement
from verst.config.recipe import RlRecipe
from verst.config.sections import ChosenSync
from verst.engine.client import EngineClient
from verst.errors import EngineError, ProcessDied, StateLost, SyncError
from verst.rollout.engines import EnginePool


def spawn_trainers(recipe: RlRecipe, processes: Processes, *, device: str) -> list[Any]:
    """The actors of all ranks, which load nothing yet."""
    return [
        processes.spawn(f"trainer rank {rank}", TrainerActor, "trainer", recipe, rank=rank, device=device, place=rank)
        for rank in range(recipe.trainer.ranks)
    ]


def watch_trainers(recipe: RlRecipe, trainer: TrainerGroup, processes: Processes, supervisor: Supervisor) -> None:
    """The actors that have the ranks' names now."""
    for name in trainer.names:
        _watch(name, Asked(processes[name]), recipe.supervision.trainer_s, trainer, processes, supervisor)


def _watch(
    name: str, asked: Asked, limit_s: float, trainer: TrainerGroup, processes: Processes, supervisor: Supervisor
) -> None:
    watched = Watched(
        limit_s=limit_s,
        key="supervision.trainer_s",
        has_work=lambda: trainer.has_work,
        progress=lambda: (trainer.num_done, asked()),
        end=lambda: processes.end(name),
    )
    supervisor.watch(name, watched)


async def loan_of(recipe: RlRecipe, trainer: TrainerGroup, index: int) -> Any:
    """For engine `index`, of the rank beside it; None where nothing is lent."""
    placement = recipe.cluster.placement
    shares = isinstance(placement, ColocatedPlacement) and placement.share_base
    return (await trainer.lend())[index] if shares else None


class Restarts:
    """Of engines, as their pool's `Mender`, and of all trainer ranks together."""

    def __init__(
        self,
        recipe: RlRecipe,
        processes: Processes,
        supervisor: Supervisor,
        fleet: EngineFleet,
        trainer: TrainerGroup,
        hand_over: HandOver,
        *,
        device: str,
        client: Callable[[str], EngineClient],
        choose_sync: Callable[[], Awaitable[ChosenSync]],
    ) -> None:
        """client: makes that of a URL. choose_sync: for the places where trainer ranks stand now."""
        self._recipe, self._processes, self._supervisor, self._fleet = recipe, processes, supervisor, fleet
        self._trainer, self._hand_over = trainer, hand_over
        self._device, self._client, self._choose_sync = device, client, choose_sync

    async def is_lost(self, client: EngineClient, error: EngineError | SyncError) -> bool:
        """An engine without memory is no better than a dead one."""
        return "out of memory" in str(error) or not await client.health()

    async def replace(self, index: int, error: EngineError | SyncError) -> tuple[EngineClient, bool]:
        """See `Mender`. Raises ProcessDied with a diagnosis after too many faults, StateLost where the trainer is gone."""
        loan = functools.partial(loan_of, self._recipe, self._trainer, index)
        while True:
            client = self._client(await self._fleet.replace(index, error, loan))
            try:
                await client.negotiate()
                return client, await self._hand_over.to_one(index, client)
            except (EngineError, SyncError) as again:
                await client.close()
                await self._trainer.check()
                error = again

    async def restart_trainer(self, engines: EnginePool, why: StateLost) -> None:
        """New ranks in the place of all, as they were built first, and engines in the place of those that computed with
        the lost ones' memory; the next sync brings weights.

        Raises ProcessDied with a diagnosis after too many faults.
        """
        gone, started, trainer = await engines.abandoned(), time.monotonic(), self._trainer
        lost: dict[str, str] = {}
        if not trainer.lost:
            # Its ranks live, but what it held is not what engines need: no run may begin again for that for ever.
            self._supervisor.fault(Fault(kind="trainer", process="trainer", reason=str(why)))
        while True:
            lost = dict(trainer.lost) or lost
            await self._end_ranks()
            trainer.renew(spawn_trainers(self._recipe, self._processes, device=self._device))
            self._hand_over.forget()
            watch_trainers(self._recipe, trainer, self._processes, self._supervisor)
            try:
                await self._processes.know(*trainer.names)
                await trainer.build(await self._choose_sync())
                await trainer.locate()
                break
            except StateLost:
                continue
            except ProcessDied as error:
                trainer.lost.setdefault(trainer.names[0], str(error))
        for name in lost:
            self._supervisor.restarted(name, seconds=time.monotonic() - started)
        placement = self._recipe.cluster.placement
        if isinstance(placement, ColocatedPlacement) and placement.share_base:
            gone = list(range(self._recipe.engine.num))
        for index in gone:
            client = self._client(
                await self._fleet.renew(index, functools.partial(loan_of, self._recipe, trainer, index))
            )
            await client.negotiate()
            await engines.put(index, client)
            self._supervisor.restarted(self._fleet.names(index)[0], seconds=time.monotonic() - started)

    async def _end_ranks(self) -> None:
        """All of them; those that were lost count as faults."""
        for name in self._trainer.names:
            self._supervisor.forget(name)
            self._processes.end(name)
        for name, reason in self._trainer.lost.items():
            log = await self._processes.last_lines(name)
            self._supervisor.fault(Fault(kind="trainer", process=name, reason=reason, log=log))
