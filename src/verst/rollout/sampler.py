"""The next rollout: prompts by position, groups through the pipeline, filters, and groups kept from one to the next.

What it needs to go on, in the same process or in another, is one number and the kept groups; both change only when a
rollout is complete, so that one that was stopped in the middle is made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verst.config.recipe import RlRecipe
from verst.rollout import journal
from verst.rollout.dynamic import Collected, collect
from verst.rollout.filters import GroupFilters
from verst.rollout.journal import SampledGroup, sampled_group
from verst.rollout.pipeline import Parse, Pipeline, ScoredMicrogroup, StageSeconds
from verst.rollout.plan import MicrogroupTask, plan_group
from verst.rollout.prompts import PromptSource
from verst.types import Group


@dataclass(frozen=True, kw_only=True)
class Rollout:
    groups: tuple[Group, ...]
    """All that were judged: kept ones of earlier rollouts first, then by number (or, not deterministic, by completion)."""
    dropped_by: tuple[str | None, ...]
    """For each group the filter that drops it; None: it is trained on."""
    scored: tuple[ScoredMicrogroup, ...]
    """Their microgroups."""
    seconds: StageSeconds
    metrics: Mapping[str, float]
    """rollout/..."""


@dataclass(frozen=True, kw_only=True)
class _Judged:
    sampled: SampledGroup
    dropped_by: str | None


class Sampler:
    def __init__(
        self,
        recipe: RlRecipe,
        source: PromptSource,
        pipeline: Pipeline,
        filters: GroupFilters,
        *,
        weight_version: Callable[[], int],
    ) -> None:
        """weight_version: of the weights that the engines hold now."""
        self._recipe = recipe
        self._source = source
        self._pipeline = pipeline
        self._filters = filters
        self._weight_version = weight_version
        self._position = 0
        self._kept: list[SampledGroup] = []

    async def rollout(self, number: int) -> Rollout:
        """number: from 0. Raises what the pipeline raises."""
        config, size = self._recipe.rollout.dynamic, self._recipe.rollout.num_groups
        fresh = [kept for kept in self._kept if self._lag(kept) <= config.staleness]
        clock = _Clock()

        async def sample(group: int) -> _Judged:
            position = self._position + group
            begun = clock.now()
            scored, seconds = await self._pipeline.run(self._plan(position, number, group))
            clock.add(seconds, begun=begun)
            sampled = sampled_group(position, scored, group_size=self._recipe.rollout.group_size)
            return _Judged(sampled=sampled, dropped_by=self._filters.dropped_by(sampled.group))

        collected = await self._collect(sample, fresh=len(fresh))
        passed = [*fresh, *(j.sampled for j in collected.judged if config.enabled and j.dropped_by is None)]
        used, left = passed[:size], passed[size:]
        judged = [_Judged(sampled=item, dropped_by=None) for item in used[: len(fresh)]]
        surplus = {id(item) for item in left}
        judged += [j for j in collected.judged if id(j.sampled) not in surplus]
        metrics = self._metrics(judged, collected)
        if config.enabled:
            metrics |= {
                "rollout/groups_cancelled": float(collected.given_up + (0 if config.staleness else len(left))),
                "rollout/groups_kept": float(len(left) if config.staleness else 0),
                "rollout/groups_stale": float(len(self._kept) - len(fresh)),
                "rollout/groups_missing": float(size - len(used)),
            }
        self._position += collected.consumed
        self._kept = left if config.staleness else []
        return Rollout(
            groups=tuple(j.sampled.group for j in judged),
            dropped_by=tuple(j.dropped_by for j in judged),
            scored=tuple(scored for j in judged for scored in j.sampled.scored),
            seconds=clock.total(),
            metrics=metrics,
        )

    async def _collect(
        self, sample: Callable[[int], Coroutine[Any, Any, _Judged]], *, fresh: int
    ) -> Collected[_Judged]:
        """fresh: kept groups that will be used first."""
        config, run, size = self._recipe.rollout.dynamic, self._recipe.run, self._recipe.rollout.num_groups
        if not config.enabled:
            return await collect(sample, lambda _: True, wanted=size, extra=0, most=size, in_order=True)
        # Which of the extra groups would be complete is a matter of time: to keep them is to wait for all of them.
        waits = run.deterministic and config.staleness > 0
        return await collect(
            sample,
            lambda judged: judged.dropped_by is None,
            wanted=max(0, size + (config.extra if waits else 0) - fresh),
            extra=0 if waits else config.extra,
            most=config.max_groups or 4 * size,
            in_order=run.deterministic,
        )

    def _metrics(self, judged: list[_Judged], collected: Collected[_Judged]) -> dict[str, float]:
        dropped = [j.dropped_by for j in judged if j.dropped_by is not None]
        return {
            "rollout/groups_sampled": float(len(collected.judged)),
            "rollout/groups_filtered": float(len(dropped)),
            "rollout/groups_used": float(len(judged) - len(dropped)),
            **{f"rollout/filtered/{name}": float(dropped.count(name)) for name in self._filters.names},
        }

    def _lag(self, kept: SampledGroup) -> int:
        """Versions between the weights that made the group and those that sample now."""
        return self._weight_version() - kept.group.weight_version

    def _plan(self, position: int, rollout: int, group: int) -> list[MicrogroupTask]:
        return plan_group(self._recipe, self._source.at(position), rollout=rollout, group=group)

    def forget(self) -> int:
        """Drop the kept groups; how many they were."""
        number, self._kept = len(self._kept), []
        return number

    def state(self) -> dict[str, Any]:
        """What a checkpoint's run state says of the sampler under `sampler`, besides `files`."""
        return {"position": self._position}

    def files(self) -> dict[str, bytes]:
        """The kept groups as files of a checkpoint."""
        return journal.to_files(self._kept)

    async def restore(self, state: Mapping[str, Any], folder: Path, parse: Parse) -> None:
        """Go on from a verified checkpoint; state: all of its run state. Raises CheckpointError."""
        self._position = position_after(self._recipe, state)
        self._kept = await journal.from_files(
            folder, plan=self._plan, parse=parse, group_size=self._recipe.rollout.group_size
        )


def position_after(recipe: RlRecipe, state: Mapping[str, Any]) -> int:
    """The prompt position of the rollout after a checkpoint, from its run state.

    A checkpoint that names none is of a run without dynamic sampling, which takes num_groups prompts an iteration.
    """
    sampler = state.get("sampler")
    return int(sampler["position"] if sampler else state["iteration"] * recipe.rollout.num_groups)


class _Clock:
    """Wall times of groups that overlap."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._generated = 0.0
        self._stages: dict[str, float] = {}

    def add(self, seconds: StageSeconds, *, begun: float) -> None:
        """begun: `now()` when the group was begun."""
        self._generated = max(self._generated, begun + seconds.last_generated)
        for name, value in seconds.stages.items():
            self._stages[name] = self._stages.get(name, 0.0) + value

    def now(self) -> float:
        return time.perf_counter() - self._started

    def total(self) -> StageSeconds:
        return StageSeconds(total=self.now(), last_generated=self._generated, stages=self._stages)
