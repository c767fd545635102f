"""Trainer ranks and engines in Ray placement groups: how much each takes of a node, and whether nodes have that much."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.util
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verst.config.placement import ColocatedPlacement, FreePlacement, SeparatePlacement, Strategy
from verst.config.plan import process_plan
from verst.config.recipe import RlRecipe
from verst.errors import ConfigError, InvariantError
from verst.trainer.topology import Place

_MARK = 0.001
"""Of a custom resource that only marks nodes; Ray counts in ten-thousandths."""
Resources = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Bundles:
    """What one placement group reserves: `count` times the same."""

    roles: tuple[str, ...]
    """Process i of each role stands in bundle i."""
    count: int
    resources: Resources
    """Of one bundle: CPU, GPU, marks of nodes."""
    strategy: Strategy


def bundles_of(recipe: RlRecipe, *, cuda: bool) -> list[Bundles]:
    """The groups of a recipe's placement; none where it is free."""
    plan = {process.role: process for process in process_plan(recipe, cuda=cuda)}

    def bundles(roles: tuple[str, ...], strategy: Strategy, mark: str | None = None) -> Bundles:
        resources = {"CPU": sum(plan[role].cpus for role in roles)}
        if cuda:
            resources["GPU"] = round(sum(plan[role].gpus for role in roles), 4)
        if mark is not None:
            resources[mark] = _MARK
        return Bundles(roles=roles, count=plan[roles[0]].count, resources=resources, strategy=strategy)

    match recipe.cluster.placement:
        case FreePlacement():
            return []
        case ColocatedPlacement(strategy=strategy):
            return [bundles(("trainer", "engine"), strategy)]
        case SeparatePlacement() as separate:
            return [
                bundles(("trainer",), separate.trainer_strategy, separate.trainer_nodes),
                bundles(("engine",), separate.engine_strategy, separate.engine_nodes),
            ]


def room_problem(groups: Sequence[Bundles], nodes: Sequence[Resources]) -> str | None:
    """What nodes of these sizes lack for the groups, as far as counting can tell; None where nothing does."""
    for group in groups:
        fits = [_times(group.resources, node) for node in nodes]
        what = f"{group.count} x {_words(group.resources)} for {' with '.join(group.roles)} ({group.strategy})"
        have = f"{len(nodes)} nodes have {'; '.join(_words(_named(node, group.resources)) for node in nodes)}"
        if group.strategy == "STRICT_PACK" and max(fits, default=0) < group.count:
            return f"{what} do not fit on one node: {have}"
        if group.strategy == "STRICT_SPREAD" and sum(map(bool, fits)) < group.count:
            return f"{what} need {group.count} nodes, {sum(map(bool, fits))} of them are large enough: {have}"
        if sum(fits) < group.count:
            return f"{what} do not fit: {have}"
    for name in ("GPU", "CPU"):
        asked = sum(group.resources.get(name, 0.0) * group.count for group in groups)
        found = sum(node.get(name, 0.0) for node in nodes)
        if asked > found:
            return f"trainer ranks and engines ask for {asked:g} {name}s together, {len(nodes)} nodes have {found:g}"
    return None


class Placement:
    """The reservation of one run. `reserve` before actors are made, `release` after they have ended."""

    def __init__(self, recipe: RlRecipe, *, cuda: bool) -> None:
        """Raises ConfigError for ranks of one engine that Ray could put on one GPU."""
        per_engine = recipe.engine.parallel.ranks
        if cuda and per_engine > 1 and isinstance(recipe.cluster.placement, FreePlacement):
            raise ConfigError(
                f"cluster.placement.type = free may put the {per_engine} ranks of an engine (engine.parallel) on one GPU, "
                "which NCCL refuses: use separate"
            )
        self._config = recipe.cluster
        self._bundles = bundles_of(recipe, cuda=cuda)
        self._groups: list[tuple[Bundles, PlacementGroup]] = []

    async def reserve(self) -> None:
        """Raises ConfigError where the nodes have no room, at once for a local Ray, after `wait_s` for a cluster."""
        if self._config.address is None:
            self._refuse(room_problem(self._bundles, _nodes()))
        for bundles in self._bundles:
            group = ray.util.placement_group([dict(bundles.resources)] * bundles.count, strategy=bundles.strategy)
            self._groups.append((bundles, group))
        for bundles, group in self._groups:
            if not await asyncio.to_thread(group.wait, self._config.wait_s):
                taken = f"{' with '.join(bundles.roles)} had no room in {self._config.wait_s:g} s (cluster.wait_s)"
                self._refuse(room_problem(self._bundles, _nodes()) or f"{taken}: others of this cluster hold it")

    def options(self, role: str, index: int) -> dict[str, Any]:
        """Of the actor of process `index` of a role; empty where it may stand anywhere."""
        if role == "router":
            # Every answer goes from there to the driver.
            here = ray.get_runtime_context().get_node_id()
            return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=True)}
        for bundles, group in self._groups:
            if role in bundles.roles:
                strategy = PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
                )
                return {"scheduling_strategy": strategy}
        return {}

    def verify(self, trainers: Sequence[Place], engines: Sequence[Place]) -> None:
        """Raises InvariantError where Ray put a colocated pair on two devices."""
        if not isinstance(self._config.placement, ColocatedPlacement):
            return
        for index, (trainer, engine) in enumerate(zip(trainers, engines, strict=True)):
            if trainer != engine:
                raise InvariantError(
                    f"cluster.placement.type = colocated, but trainer rank {index} is at {trainer} and its engine at {engine}"
                )

    def release(self) -> None:
        for _, group in self._groups:
            ray.util.remove_placement_group(group)
        self._groups.clear()

    def _refuse(self, problem: str | None) -> None:
        if problem is not None:
            raise ConfigError(
                f"cluster.placement.type = {self._config.placement.type}: {problem}. Ask for fewer processes "
                "(trainer.ranks, engine.num), another strategy or placement, or more nodes; cluster.num_cpus is a logical "
                "count"
            )


def _nodes() -> list[Resources]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _times(bundle: Resources, node: Resources) -> int:
    # Ray's numbers are multiples of a ten-thousandth, floats are not.
    return min(int(node.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items())


def _named(node: Resources, bundle: Resources) -> Resources:
    return {name: node.get(name, 0.0) for name in bundle}


def _words(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
