"""The microgroup pipeline.

    task ─> generate (engine) ─> parse (pool) ─> echo check ─> score (reward pools) ─> group complete

Consumes microgroup tasks; produces complete groups in order. Each microgroup is one asyncio task that waits only for
its own stages: no stage waits for the whole batch. The first failure cancels the rest and is raised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

from verst.engine.wire import Answer
from verst.errors import InvariantError
from verst.obs import spans
from verst.obs.spans import Spans
from verst.rollout.plan import MicrogroupTask
from verst.types import Group, Microgroup, SampleKey, Scores

T = TypeVar("T")
Generate = Callable[[MicrogroupTask], Awaitable[Answer]]
Parse = Callable[[Answer, Sequence[SampleKey]], Awaitable[Microgroup]]
Check = Callable[[MicrogroupTask, Microgroup, int], None]
"""(task, what came of it, intended weight version). Raises EchoError where the engine did something else."""
Score = Callable[[MicrogroupTask, Microgroup], Awaitable[Scores]]


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Wall seconds of a rollout."""

    total: float
    last_generated: float
    """From the start to the last engine answer; what follows is parsing and scoring alone."""


@dataclass(frozen=True, kw_only=True)
class ScoredMicrogroup:
    task: MicrogroupTask
    microgroup: Microgroup
    scores: Scores
    answer: Answer | None = None
    """The engine's answer as it came, where the pipeline keeps it."""


class Pipeline:
    def __init__(
        self,
        *,
        generate: Generate,
        parse: Parse,
        check: Check,
        score: Score,
        spans: Spans | None = None,
        keep_answers: bool = False,
    ) -> None:
        """keep_answers: for microgroups that may have to outlive the process."""
        self._generate = generate
        self._parse = parse
        self._check = check
        self._score = score
        self._spans = spans or Spans()
        self._keep_answers = keep_answers

    async def run(
        self,
        tasks: Sequence[MicrogroupTask],
        *,
        weight_version: int,
        on_generated: Callable[[], None] = lambda: None,
    ) -> tuple[list[ScoredMicrogroup], StageSeconds]:
        """Every task's microgroup, scored, in the order of `tasks`. Raises the first failure by itself.

        weight_version: that must have made them. on_generated: called for each when the engine's answer is there.
        """
        times = _Times(started_s=time.monotonic())
        scored: list[ScoredMicrogroup] = await together(
            *(self._microgroup(task, times, weight_version, on_generated) for task in tasks)
        )
        ended_s = time.monotonic()
        for task, scored_s in times.scored:
            if not task.is_heldout:
                with spans.of(**_name(task)):
                    self._spans.add("group_wait", start_s=scored_s, end_s=ended_s)
        seconds = StageSeconds(total=ended_s - times.started_s, last_generated=times.generated_s - times.started_s)
        return scored, seconds

    async def _microgroup(
        self, task: MicrogroupTask, times: _Times, weight_version: int, on_generated: Callable[[], None]
    ) -> ScoredMicrogroup:
        with spans.of(**_name(task)):
            answer = await self._timed("generate", self._generate(task))
            times.generated_s = time.monotonic()
            on_generated()
            microgroup = await self._timed("deserialize", self._parse(answer, task.keys))
            self._check(task, microgroup, weight_version)
            scores = await self._timed("reward", self._score(task, microgroup))
        times.scored.append((task, time.monotonic()))
        kept = answer if self._keep_answers else None
        return ScoredMicrogroup(task=task, microgroup=microgroup, scores=scores, answer=kept)

    async def _timed(self, stage: str, work: Awaitable[T]) -> T:
        with self._spans.span(stage):
            return await work


@dataclass(kw_only=True)
class _Times:
    """Of one run, on the monotonic clock."""

    started_s: float
    generated_s: float = 0.0
    """When the last engine answer was there."""
    scored: list[tuple[MicrogroupTask, float]] = field(default_factory=list)


def _name(task: MicrogroupTask) -> dict[str, int]:
    """What the spans of a microgroup say."""
    return {
        "rollout": task.rollout,
        "group": task.group,
        "index": task.keys[0].index,
        "samples": len(task.keys),
    }


async def together(*works: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all. The first failure ends the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise_first(failures)
    return [job.result() for job in jobs]


def raise_first(failures: BaseExceptionGroup) -> NoReturn:
    """Raises the first exception of a group that is not itself a group, with the cause that it has."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error from (error.__cause__ or failures)


def in_prompt_order(scored: Sequence[ScoredMicrogroup], values: Sequence[T]) -> list[T]:
    """values: one for each sample of an evaluation, microgroup by microgroup; they come back by the prompts' position."""
    positions = [key.group for item in scored for key in item.task.keys]
    return [value for _, value in sorted(zip(positions, values, strict=True), key=lambda pair: pair[0])]


def assemble(scored: Sequence[ScoredMicrogroup], *, group_size: int) -> list[Group]:
    """Complete groups, by number, samples by index. Raises InvariantError for a group with a hole."""
    by_group: dict[int, list[ScoredMicrogroup]] = {}
    for item in scored:
        by_group.setdefault(item.task.group, []).append(item)
    groups = []
    for number in sorted(by_group):
        items = sorted(by_group[number], key=lambda item: item.task.keys[0].index)
        indices = [key.index for item in items for key in item.task.keys]
        if indices != list(range(group_size)):
            raise InvariantError(f"group {number} holds samples {indices}, must be 0..{group_size - 1}")
        groups.append(
            Group(
                rollout=items[0].task.rollout,
                index=number,
                prompt=items[0].task.prompts[0],
                microgroups=tuple(_conditioned(item, items[0]) for item in items),
                scores=tuple(item.scores for item in items),
                metadata=items[0].task.metadata[0],
            )
        )
    return groups


def _conditioned(item: ScoredMicrogroup, first: ScoredMicrogroup) -> Microgroup:
    """The microgroup, with the conditioning of the group's first one where it was to have no own."""
    if item.task.request.rollout_return_denoising_env:
        return item.microgroup
    return replace(item.microgroup, conditioning=first.microgroup.conditioning)
