"""Sampling until enough groups have passed: how many are begun, when it is enough, and what is given up then.

begin ─> sampled ─> passes? ─yes─> one less is missing
                        └──no───> one more is begun, up to the bound
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
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
    done: dict[int, T] = {}
    passed: set[int] = set()
    running: dict[asyncio.Task[T], int] = {}
    begun = 0
    try:
        while (end := _end(done, passed, wanted, in_order)) is None:
            while begun < most and len(running) < wanted - len(passed) + extra:
                running[asyncio.create_task(sample(begun))] = begun
                begun += 1
            if not running:
                break
            finished, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for job in sorted(finished, key=running.__getitem__):
                number = running.pop(job)
                done[number] = job.result()
                if passes(done[number]):
                    passed.add(number)
    finally:
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if not in_order or end is None:
        return Collected(judged=tuple(done.values()), consumed=begun, given_up=len(running))
    return Collected(judged=tuple(done[number] for number in range(end)), consumed=end, given_up=begun - end)


def _end(done: Mapping[int, object], passed: set[int], wanted: int, in_order: bool) -> int | None:
    """How many numbers from 0 are enough; None while they are not."""
    if not in_order:
        return len(done) if len(passed) >= wanted else None
    number = count = 0
    while count < wanted:
        if number not in done:
            return None
        count += number in passed
        number += 1
    return number
