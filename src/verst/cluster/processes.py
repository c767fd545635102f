"""Actors by name: made in their place, known by process id, ended for good."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verst.cluster.actors import Facts, Process
from verst.cluster.calls import result_of
from verst.cluster.diagnosis import last_lines
from verst.cluster.placement import Placement
from verst.config.plan import process_plan
from verst.config.recipe import RlRecipe
from verst.weights.block import host_identity

T = TypeVar("T")


class Processes:
    """All actors of a run. A name that is made again stands for the new one."""

    def __init__(self, recipe: RlRecipe, placement: Placement, *, cuda: bool) -> None:
        self._plan = {p.role: p for p in process_plan(recipe, cuda=cuda)}
        self._placement = placement
        self._actors: dict[str, Any] = {}
        self._roles: dict[str, str] = {}
        self._facts: dict[str, Facts] = {}
        self.on_change: Callable[[Mapping[str, list[int]]], None] = lambda pids: None
        """Called with `pids` whenever they are others."""

    def spawn(self, name: str, cls: type[Process], role: str, *args: Any, place: int = 0, **kwargs: Any) -> Any:
        """role: of the process plan. place: bundle of the role's placement group."""
        plan = self._plan[role]
        options: dict[str, Any] = {"num_cpus": plan.cpus, "num_gpus": plan.gpus, "max_concurrency": cls.calls_at_a_time}
        options |= self._placement.options(role, place)
        if cls.is_asked_while_it_works:
            options["concurrency_groups"] = {"watch": 1}
        actor: Any = ray.remote(**options)(cls).remote(*args, **kwargs)
        self._actors[name], self._roles[name] = actor, role
        self._facts.pop(name, None)
        return actor

    def __getitem__(self, name: str) -> Any:
        return self._actors[name]

    async def know(self, *names: str) -> None:
        """Ask them who they are. Raises ProcessDied."""
        found = await asyncio.gather(*(result_of(self._actors[name].facts.remote(), role=name) for name in names))
        self._facts |= zip(names, found, strict=True)
        self.on_change(self.pids())

    def host(self, name: str) -> str:
        """`host_identity` of a process that is known."""
        return self._facts[name].host

    def pids(self) -> dict[str, list[int]]:
        """role -> process ids, of those that are known."""
        by_role: dict[str, list[int]] = {}
        for name, facts in sorted(self._facts.items()):
            role = self._roles[name].replace("gold:", "reward:")
            by_role.setdefault(role, []).append(facts.pid)
        return by_role

    def end(self, name: str) -> None:
        """For good, even where it is stopped and hears nothing. Twice is no fault."""
        ray.kill(self._actors[name])
        facts = self._facts.get(name)
        if facts is not None:
            self._there(facts, _kill, facts.pid, facts.started)

    async def last_lines(self, name: str) -> list[str]:
        """Of its log; none where it never said where that is."""
        facts = self._facts.get(name)
        if facts is None or facts.log is None:
            return []
        lines = self._there(facts, last_lines, Path(facts.log))
        try:
            return await lines if isinstance(lines, ray.ObjectRef) else lines
        except ray.exceptions.RayError:
            return []

    def end_all(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)

    def _there(self, facts: Facts, function: Callable[..., T], *args: Any) -> Any:
        """The function's result where the process is of this host; else a reference to it, from the process's node."""
        if facts.host == host_identity():
            return function(*args)
        on_node = NodeAffinitySchedulingStrategy(facts.node, soft=False)
        task: Any = ray.remote(function)
        return task.options(num_cpus=0, scheduling_strategy=on_node).remote(*args)


class Asked:
    """What an actor says of its progress, asked again each time that it has answered. None until it has."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._asking: asyncio.Future[Any] | None = None
        self._said: Any = None

    def __call__(self) -> Any:
        if self._asking is not None and not self._asking.done():
            return self._said
        # One that is dead says nothing more; whoever waits for its work hears of that.
        if self._asking is not None and self._asking.exception() is None:
            self._said = self._asking.result()
        self._asking = asyncio.ensure_future(self._actor.progress.remote())
        self._asking.add_done_callback(_seen)
        return self._said


def _seen(asking: asyncio.Future[Any]) -> None:
    # Whether or not it is looked at again: its end is told where its work is waited for.
    if not asking.cancelled():
        asking.exception()


def _kill(pid: int, started: float) -> None:
    # A number may be another process's by now, and none that we did not start is ended.
    with contextlib.suppress(psutil.NoSuchProcess):
        if psutil.Process(pid).create_time() == started:
            os.kill(pid, signal.SIGKILL)
