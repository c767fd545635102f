"""Sampling until enough groups have passed: how many are begun, when it is enough, and what is given up then.

begin ─> sampled ─> passes? ─yes─> one less is missing
                        └──no───> one more is begun, up to the bound
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Collected(Generic[T]):
    judged: tuple[T, ...]
    """What was sampled and counts: by number in order, otherwise by completion."""
    consumed: int
    """Numbers that are used up: the next rollout goes on behind them."""
    given_up: int
    """Begun, and of no use any more when it was enough."""


async def collect(
    sample: Callable[[int], Coroutine[Any, Any, T]],
    passes: Callable[[T], bool],
    *,
    wanted: int,
    extra: int,
    most: int,
    in_order: bool,
) -> Collected[T]:
    """Sample numbers 0, 1, 2, ... until `wanted` of them pass or `most` were begun.

    As many are in flight as are still missing, and `extra`; those that run when it is enough are cancelled, and waited
    for. in_order: the result is the shortest run of numbers from 0 with enough that pass, which does not depend on
    timing; otherwise the first to complete count. Raises what `sample` raises first, with the rest cancelled.
    """
    tally = _Tally(wanted=wanted, in_order=in_order)
    running: dict[asyncio.Task[T], int] = {}
    completed: deque[asyncio.Task[T]] = deque()
    woken = asyncio.Event()

    def on_done(job: asyncio.Task[T]) -> None:
        completed.append(job)
        woken.set()

    done: dict[int, T] = {}
    begun = 0
    try:
        while not tally.is_enough:
            while begun < most and len(running) < wanted - tally.num_passed + extra:
                job = asyncio.create_task(sample(begun))
                running[job] = begun
                job.add_done_callback(on_done)
                begun += 1
            if not running:
                break
            # Not asyncio.wait, which looks at every running one each time that one of them completes.
            await woken.wait()
            woken.clear()
            while completed:
                job = completed.popleft()
                number = running.pop(job)
                done[number] = job.result()
                tally.add(number, passed=passes(done[number]))
    finally:
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if not in_order or not tally.is_enough:
        return Collected(judged=tuple(done.values()), consumed=begun, given_up=len(running))
    end = tally.end
    return Collected(judged=tuple(done[number] for number in range(end)), consumed=end, given_up=begun - end)


class _Tally:
    """Whether what is done is enough. Each number is looked at once, however many there are."""

    def __init__(self, *, wanted: int, in_order: bool) -> None:
        self._wanted = wanted
        self._in_order = in_order
        self._verdicts: dict[int, bool] = {}
        """Of the numbers that are done, from `end` on."""
        self._passed_in_order = 0
        self.num_passed = 0
        self.end = 0
        """In order: numbers from 0 that count."""

    @property
    def is_enough(self) -> bool:
        return (self._passed_in_order if self._in_order else self.num_passed) >= self._wanted

    def add(self, number: int, *, passed: bool) -> None:
        self.num_passed += passed
        self._verdicts[number] = passed
        while self._passed_in_order < self._wanted and self.end in self._verdicts:
            self._passed_in_order += self._verdicts.pop(self.end)
            self.end += 1
