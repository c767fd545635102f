"""All workers of one reward as one: a call waits for a free worker, and small batches may share a call."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from verst.config.rewards import RewardConfig, reward_name, rows_are_independent
from verst.rewards.base import RewardBatch
from verst.rewards.calls import Call, CallResult, score_with_policy


@dataclass
class _Waiting:
    """Batches that will share a call."""

    batches: list[RewardBatch] = field(default_factory=list)
    results: list[asyncio.Future[CallResult]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None

    def num_samples(self) -> int:
        return sum(map(len, self.batches))


class RewardPool:
    """At most `workers` calls are in flight, so that `timeout_s` is the time of a call and not of its queue.

    With `merge_size` batches of one shape share a call: it is made when that many samples wait, or `merge_wait_ms` after
    the first of them. In a deterministic run that is only done for rewards whose rows are independent: what shares a
    call depends on timing, and must not change a score.
    """

    def __init__(
        self, config: RewardConfig, call: Call, *, deterministic: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.name = reward_name(config)
        self._config = config
        self._raw_call = call
        self._clock = clock
        self._merges = config.merge_size > 0 and (rows_are_independent(config) or not deterministic)
        self._places = asyncio.Semaphore(config.workers)
        self._waiting: dict[Any, _Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued = 0
        self._reset()

    async def score(self, batch: RewardBatch) -> CallResult:
        """Raises RewardError after a final failure under "stop"; of all batches of a shared call."""
        if not self._merges:
            return await self._with_policy(batch)
        key = batch.kind()
        waiting = self._waiting.setdefault(key, _Waiting())
        loop = asyncio.get_running_loop()
        result: asyncio.Future[CallResult] = loop.create_future()
        waiting.batches.append(batch)
        waiting.results.append(result)
        if waiting.num_samples() >= self._config.merge_size:
            self._flush(key)
        elif waiting.timer is None:
            waiting.timer = loop.call_later(self._config.merge_wait_ms / 1000, self._flush, key)
        return await result

    def metrics(self) -> dict[str, float]:
        """Since the last call of this; see docs/metrics.md."""
        elapsed = self._clock() - self._since
        values = {
            "utilisation": self._busy_s / (elapsed * self._config.workers) if elapsed > 0 else 0.0,
            "max_queue": float(self._max_queue),
            "calls": float(self._num_calls),
            "samples_per_call": self._num_samples / self._num_calls if self._num_calls else 0.0,
        }
        self._reset()
        return {f"perf/reward/{self.name}/{name}": value for name, value in values.items()}

    def _reset(self) -> None:
        self._since = self._clock()
        self._busy_s, self._num_calls, self._num_samples, self._max_queue = 0.0, 0, 0, self._queued

    def _flush(self, key: Any) -> None:
        waiting = self._waiting.pop(key)
        if waiting.timer is not None:
            waiting.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._shared(waiting))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shared(self, waiting: _Waiting) -> None:
        try:
            result = await self._with_policy(RewardBatch.join(waiting.batches))
        except BaseException as error:
            for future in waiting.results:
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        start = 0
        for batch, future in zip(waiting.batches, waiting.results, strict=True):
            if not future.done():
                future.set_result(result.part(start, start + len(batch)))
            start += len(batch)

    async def _with_policy(self, batch: RewardBatch) -> CallResult:
        config = self._config
        return await score_with_policy(
            self._call,
            batch,
            name=self.name,
            attempts=config.attempts,
            timeout_s=config.timeout_s,
            on_failure=config.on_failure,
            place=self._place,
        )

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """A free worker's place."""
        self._queued += 1
        self._max_queue = max(self._max_queue, self._queued)
        try:
            await self._places.acquire()
        finally:
            self._queued -= 1
        try:
            yield
        finally:
            self._places.release()

    async def _call(self, batch: RewardBatch) -> Any:
        self._num_calls += 1
        self._num_samples += len(batch)
        started = self._clock()
        try:
            return await self._raw_call(batch)
        finally:
            self._busy_s += self._clock() - started
