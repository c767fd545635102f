"""All workers of one reward as one: samples queue for them, and a free worker takes as many as make a call.

score ─> cut to calls ─> queue (one for each kind of batch) ─> a free worker ─> scores, failed samples once more
                             └ waits for company up to a deadline
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol

from verst.config.rewards import RewardConfig, is_group_wise, reward_name, rows_are_independent
from verst.rewards.base import RewardBatch, Score
from verst.rewards.calls import Call, CallResult, attempt, score_with_policy


class OnSpan(Protocol):
    """Told of a wait, or of a worker's call, on `time.monotonic()`."""

    def __call__(
        self, name: str, *, start_s: float, end_s: float, lane: str | None = None, **attributes: str | int
    ) -> None: ...


@dataclass(kw_only=True, eq=False)
class _Piece:
    """Samples of one microgroup that are scored in one call."""

    batch: RewardBatch
    scores: asyncio.Future[list[Score]]
    due: float
    """When it stops waiting for company, on the loop's clock."""
    is_queued: bool = True
    since_s: float = field(default_factory=time.monotonic)
    context: Context = field(default_factory=copy_context)
    """Of who asked: spans of its wait are added there."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    """A call."""

    pieces: Sequence[_Piece]
    worker: int


@dataclass(kw_only=True)
class _Lane:
    """Pieces of one kind, which may share a call; the first goes first."""

    pieces: deque[_Piece] = field(default_factory=deque)
    num_samples: int = 0
    """Of those that nobody has given up."""

    def add(self, pieces: Sequence[_Piece], *, in_front: bool) -> None:
        if in_front:
            self.pieces.extendleft(reversed(pieces))
        else:
            self.pieces.extend(pieces)
        self.num_samples += sum(len(piece.batch) for piece in pieces)

    def head(self) -> _Piece | None:
        while self.pieces and not self.pieces[0].is_queued:
            self.pieces.popleft()
        return self.pieces[0] if self.pieces else None

    def drop(self, piece: _Piece) -> None:
        """It is taken, or given up."""
        if piece.is_queued:
            piece.is_queued = False
            self.num_samples -= len(piece.batch)


class RewardPool:
    """At most `workers` calls are in flight, so that `timeout_s` is the time of a call and not of its queue.

    With `merge_size` a call has up to so many samples: batches of one shape share it, and larger batches are cut, so that
    idle workers help with the last ones. A free worker takes a full call at once, and a smaller one `merge_wait_ms` after
    its first sample came; while all are busy, calls go on filling up. Samples that failed go before those that came later.
    In a deterministic run that is only done for rewards whose rows are independent: what shares a call depends on timing,
    and must not change a score. Rewards that compare a group always get that group alone, and whole.
    """

    def __init__(
        self,
        config: RewardConfig,
        call: Call,
        *,
        deterministic: bool,
        limited: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        on_span: OnSpan = lambda name, **span: None,
    ) -> None:
        """limited: `timeout_s` is kept here; else by `call`, which knows when a worker has begun."""
        self.name = reward_name(config)
        self._config = config
        self._raw_call, self._limited = call, limited
        self._clock = clock
        merges = not is_group_wise(config) and (rows_are_independent(config) or not deterministic)
        self._size = config.merge_size if merges else 0
        """Samples of a call; 0: each batch is one."""
        self._free = list(range(config.workers))
        """Numbers of the workers that do nothing, a heap."""
        self._on_span = on_span
        self._lanes: dict[Any, _Lane] = {}
        self._calls: dict[asyncio.Task[None], _Running] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reset()

    async def score(self, batch: RewardBatch) -> CallResult:
        """Raises RewardError after a final failure under "stop"."""
        config, asked = self._config, 0

        async def ask(rows: RewardBatch) -> list[Score]:
            nonlocal asked
            asked += 1
            return await self._ask(rows, again=asked > 1)

        return await score_with_policy(
            ask, batch, name=self.name, attempts=config.attempts, on_failure=config.on_failure
        )

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
        self._busy_s, self._num_calls, self._num_samples, self._max_queue = 0.0, 0, 0, self._queued()

    def _queued(self) -> int:
        return sum(lane.num_samples for lane in self._lanes.values())

    async def _ask(self, batch: RewardBatch, *, again: bool) -> list[Score]:
        """One score a sample. again: they have waited before, so they go first and for no company."""
        loop, wait_s = asyncio.get_running_loop(), self._config.merge_wait_ms / 1000
        due = 0.0 if again else loop.time() + wait_s
        pieces = [_Piece(batch=part, scores=loop.create_future(), due=due) for part in _cut(batch, self._size)]
        lane = self._lanes.setdefault(batch.kind() if self._size else None, _Lane())
        lane.add(pieces, in_front=again)
        self._dispatch()
        try:
            return [score for piece in pieces for score in await piece.scores]
        finally:
            # After a cancellation; otherwise all of them are done.
            for piece in pieces:
                lane.drop(piece)
                piece.scores.cancel()
            self._cancel_unread()

    def _cancel_unread(self) -> None:
        for task, running in self._calls.items():
            if all(piece.scores.cancelled() for piece in running.pieces):
                task.cancel()

    def _dispatch(self) -> None:
        """Every free worker gets what is ready for it."""
        loop = asyncio.get_running_loop()
        while self._free and (lane := self._ready(loop.time())) is not None:
            running = _Running(pieces=list(self._take(lane)), worker=heapq.heappop(self._free))
            context = running.pieces[0].context.copy()
            task = loop.create_task(self._call(running), name=f"reward {self.name}", context=context)
            self._calls[task] = running
            task.add_done_callback(self._ended)
        self._max_queue = max(self._max_queue, self._queued())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        heads = [head.due for lane in self._lanes.values() if (head := lane.head()) is not None]
        if self._free and heads:
            self._timer = loop.call_at(min(heads), self._dispatch)

    def _ready(self, now: float) -> _Lane | None:
        """The lane with the longest waiting piece, of those that fill a call or are due; empty ones are removed."""
        heads = {key: head for key, lane in self._lanes.items() if (head := lane.head()) is not None}
        self._lanes = {key: self._lanes[key] for key in heads}
        ready = [k for k, head in heads.items() if head.due <= now or self._lanes[k].num_samples >= self._size]
        return self._lanes[min(ready, key=lambda key: heads[key].due)] if ready else None

    def _take(self, lane: _Lane) -> Iterable[_Piece]:
        """The pieces of the next call."""
        room = self._size
        while (head := lane.head()) is not None and (room == self._size or len(head.batch) <= room):
            lane.drop(head)
            yield head
            room -= len(head.batch)
            if room <= 0:
                return

    def _ended(self, task: asyncio.Task[None]) -> None:
        running = self._calls.pop(task)
        for piece in running.pieces:
            if task.cancelled():
                piece.scores.cancel()
            elif (error := task.exception()) is not None and not piece.scores.done():
                piece.scores.set_exception(error)
        heapq.heappush(self._free, running.worker)
        self._dispatch()

    async def _call(self, running: _Running) -> None:
        pieces, started_s = running.pieces, time.monotonic()
        for piece in pieces:
            told = functools.partial(self._on_span, "reward_wait", start_s=piece.since_s, end_s=started_s)
            piece.context.run(told, reward=self.name)
        batch = RewardBatch.join([piece.batch for piece in pieces]) if len(pieces) > 1 else pieces[0].batch
        self._num_calls += 1
        self._num_samples += len(batch)
        started = self._clock()
        try:
            scores = await attempt(self._raw_call, batch, timeout_s=self._config.timeout_s, limited=self._limited)
        finally:
            self._busy_s += self._clock() - started
            lane = f"reward/{self.name}:{running.worker}"
            self._on_span(
                "score",
                start_s=started_s,
                end_s=time.monotonic(),
                lane=lane,
                reward=self.name,
                samples=len(batch),
            )
        start = 0
        for piece in pieces:
            if not piece.scores.done():
                piece.scores.set_result(scores[start : start + len(piece.batch)])
            start += len(piece.batch)


def _cut(batch: RewardBatch, size: int) -> list[RewardBatch]:
    """The batch in parts of `size` samples, and what is left over; size 0: as it is."""
    if not size or len(batch) <= size:
        return [batch]
    return [batch.rows(range(start, min(start + size, len(batch)))) for start in range(0, len(batch), size)]
