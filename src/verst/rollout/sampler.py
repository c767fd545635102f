"""One rollout: prompts by position, groups through the pipeline, filters, and groups kept from one to the next.

What a rollout needs of those before it is a `Standing`, and what it leaves is another: nothing else is remembered, so
that one that was stopped in the middle, or in another process, is made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verst.config.recipe import RlRecipe
from verst.obs.spans import Spans
from verst.rollout.dynamic import Collected, collect
from verst.rollout.filters import GroupFilters
from verst.rollout.journal import SampledGroup, sampled_group
from verst.rollout.pipeline import Pipeline, ScoredMicrogroup, StageSeconds
from verst.rollout.plan import MicrogroupTask, plan_group
from verst.rollout.prompts import PromptSource
from verst.types import Group


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where sampling stands between two rollouts."""

    position: int = 0
    """Of the next prompt."""
    kept: tuple[SampledGroup, ...] = ()
    """Groups that dynamic sampling has left over."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    sampled: tuple[SampledGroup, ...]
    """All that were judged: kept ones of earlier rollouts first, then by number (or, not deterministic, by completion)."""
    dropped_by: tuple[str | None, ...]
    """For each group the filter that drops it; None: it is trained on."""
    seconds: StageSeconds
    metrics: Mapping[str, float]
    """rollout/..."""

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(item.group for item in self.sampled)

    @property
    def scored(self) -> tuple[ScoredMicrogroup, ...]:
        return tuple(scored for item in self.sampled for scored in item.scored)


@dataclass(frozen=True, kw_only=True)
class _Judged:
    sampled: SampledGroup
    dropped_by: str | None


class Sampler:
    """Groups begin in turn: when those before have engines for all of their microgroups or soon will. What waits longer
    needs no requests yet, and a slow reward never keeps the next group from the engines."""

    def __init__(
        self,
        recipe: RlRecipe,
        source: PromptSource,
        pipeline: Pipeline,
        filters: GroupFilters,
        *,
        spans: Spans | None = None,
    ) -> None:
        self._recipe = recipe
        self._source = source
        self._pipeline = pipeline
        self._filters = filters
        self._spans = spans or Spans()
        self._microgroups = recipe.rollout.group_size // recipe.rollout.microgroup_size
        """Of one group."""
        at_engines = recipe.engine.num * recipe.engine.queue_size
        self._turns = asyncio.Semaphore(-(-at_engines // self._microgroups) + 1)
        """Groups that are being generated."""

    def known_end(self, start: Standing) -> Standing | None:
        """What a rollout from `start` will leave; None where its filters decide."""
        rollout = self._recipe.rollout
        return None if rollout.dynamic.enabled else Standing(position=start.position + rollout.num_groups)

    async def rollout(
        self, number: int, start: Standing, *, weight_version: int, on_generated: Callable[[], None] = lambda: None
    ) -> tuple[Rollout, Standing]:
        """number: from 0. on_generated: called when engines have nothing more to do for it. Raises what the pipeline
        raises."""
        config, size = self._recipe.rollout.dynamic, self._recipe.rollout.num_groups
        fresh = [kept for kept in start.kept if weight_version - kept.group.weight_version <= config.staleness]
        clock = _Clock()
        missing = size

        def generated() -> None:
            nonlocal missing
            missing -= 1
            if missing == 0 and not config.enabled:
                on_generated()

        async def sample(group: int) -> _Judged:
            position = start.position + group
            async with self._turn(generated) as on_microgroup:
                begun = clock.now()
                tasks = self.plan(position, number, group)
                scored, seconds = await self._pipeline.run(
                    tasks, weight_version=weight_version, on_generated=on_microgroup
                )
            clock.add(seconds, begun=begun)
            sampled = sampled_group(position, scored, group_size=self._recipe.rollout.group_size)
            asked_s = time.monotonic()
            dropped_by = self._filters.dropped_by(sampled.group)
            ended_s = time.monotonic()
            self._spans.add(
                "filter", start_s=asked_s, end_s=ended_s, rollout=number, group=group, dropped_by=dropped_by
            )
            return _Judged(sampled=sampled, dropped_by=dropped_by)

        with self._spans.span("rollout", rollout=number):
            collected = await self._collect(sample, fresh=len(fresh))
        if config.enabled:
            on_generated()
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
                "rollout/groups_stale": float(len(start.kept) - len(fresh)),
                "rollout/groups_missing": float(size - len(used)),
            }
        rollout = Rollout(
            sampled=tuple(j.sampled for j in judged),
            dropped_by=tuple(j.dropped_by for j in judged),
            seconds=clock.total(),
            metrics=metrics,
        )
        kept = tuple(left) if config.staleness else ()
        return rollout, Standing(position=start.position + collected.consumed, kept=kept)

    @contextlib.asynccontextmanager
    async def _turn(self, on_group: Callable[[], None]) -> AsyncIterator[Callable[[], None]]:
        """What is to be called for each microgroup of a group that is generated; with the last one the turn is over."""
        await self._turns.acquire()
        left = self._microgroups

        def generated() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._turns.release()
                on_group()

        try:
            yield generated
        finally:
            if left:
                self._turns.release()

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

    def plan(self, position: int, rollout: int, group: int) -> Sequence[MicrogroupTask]:
        """The microgroups of one group of the prompt at this position."""
        first, *others = plan_group(self._recipe, self._source.at(position), rollout=rollout, group=group)
        return [first, *(task.without_conditioning() for task in others)]


class _Clock:
    """Wall times of groups that overlap."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._generated = 0.0

    def add(self, seconds: StageSeconds, *, begun: float) -> None:
        """begun: `now()` when the group was begun."""
        self._generated = max(self._generated, begun + seconds.last_generated)

    def now(self) -> float:
        return time.perf_counter() - self._started

    def total(self) -> StageSeconds:
        return StageSeconds(total=self.now(), last_generated=self._generated)
