"""What a simulation is made of: a clock, places that work is done in, and the queue of a reward's workers."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Then = Callable[[], None]
_FIRST_PAUSE_S = 0.2
"""Of `rewards.calls`: before a failed sample is asked about again; doubled each time."""


class Clock:
    """Events by time; those of one time in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._number = itertools.count()

    def after(self, seconds: float, then: Then) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), then))

    def step(self) -> None:
        """The next event. Raises IndexError where nothing is planned."""
        self.now, _, then = heapq.heappop(self._events)
        then()


class Places:
    """`number` of a kind, each of which does one thing at a time; what waits is served in order."""

    def __init__(self, clock: Clock, number: int) -> None:
        self.number = number
        self.free = number
        self._clock = clock
        self._waiting: deque[tuple[float, Then]] = deque()
        self._finished_s = 0.0
        """Busy seconds, as if all that is being done had just begun."""

    @property
    def busy_s(self) -> float:
        """Seconds of all places until now."""
        return self._finished_s + (self.number - self.free) * self._clock.now

    def do(self, seconds: float, then: Then) -> None:
        """Occupy a place for so long as soon as one is free, and then go on."""
        if self.free:
            self.take(seconds, then)
        else:
            self._waiting.append((seconds, then))

    def take(self, seconds: float, then: Then) -> None:
        """The same with a place that is free now."""
        self.free -= 1
        self._finished_s -= self._clock.now

        def ended() -> None:
            self.free += 1
            self._finished_s += self._clock.now
            if self._waiting:
                self.take(*self._waiting.popleft())
            then()

        self._clock.after(seconds, ended)


@dataclass(frozen=True, kw_only=True)
class RewardStage:
    """One reward and its workers; the names are those of `config.rewards`."""

    workers: int = 1
    call_s: float = 0.0
    """Of a call, whatever is in it."""
    sample_s: float = 0.0
    """And of each sample in it."""
    merge_size: int = 0
    """Most samples of a call; 0: a microgroup is one."""
    merge_wait_s: float = 0.05
    attempts: int = 3
    failure_rate: float = 0.0
    """Of one sample in one call."""
    of_group: bool = False
    """It compares a group: one call, when all samples of it are there."""


class RewardQueue:
    """The workers of one reward, by the rules of `rewards.pool`."""

    def __init__(self, clock: Clock, stage: RewardStage, rng: random.Random) -> None:
        self.workers = Places(clock, stage.workers)
        self._clock = clock
        self._stage = stage
        self._rng = rng
        self._size = 0 if stage.of_group else stage.merge_size
        self._pieces: deque[tuple[int, float, Callable[[int], None]]] = deque()
        """Samples, until when they wait for company, and what to call with the number of those that failed."""
        self._num_samples = 0

    def score(self, samples: int, then: Then, *, attempt: int = 1) -> None:
        """then: when each has a score, or has failed for good."""
        pieces = [min(self._size, samples - i) for i in range(0, samples, self._size)] if self._size else [samples]
        left, failed = len(pieces), 0

        def ended(failures: int) -> None:
            nonlocal left, failed
            left, failed = left - 1, failed + failures
            if left == 0:
                self._again(failed, then, attempt)

        due = self._clock.now + self._stage.merge_wait_s if attempt == 1 else 0.0
        waiting = [(piece, due, ended) for piece in pieces]
        if attempt == 1:
            self._pieces.extend(waiting)
        else:
            self._pieces.extendleft(waiting)
        self._num_samples += samples
        self._dispatch()
        if self._size and self._pieces and self.workers.free:
            self._clock.after(self._stage.merge_wait_s, self._dispatch)

    def _again(self, failed: int, then: Then, attempt: int) -> None:
        if failed and attempt < self._stage.attempts:
            pause_s = _FIRST_PAUSE_S * 2 ** (attempt - 1)
            self._clock.after(pause_s, lambda: self.score(failed, then, attempt=attempt + 1))
        else:
            then()

    def _dispatch(self) -> None:
        while self.workers.free and self._pieces:
            if self._num_samples < self._size and self._pieces[0][1] > self._clock.now:
                return
            self._call()

    def _call(self) -> None:
        taken = [self._pieces.popleft()]
        samples = taken[0][0]
        while self._pieces and samples + self._pieces[0][0] <= self._size:
            taken.append(self._pieces.popleft())
            samples += taken[-1][0]
        self._num_samples -= samples

        def ended() -> None:
            for count, _, tell in taken:
                tell(self._failures(count))
            self._dispatch()

        self.workers.take(self._stage.call_s + self._stage.sample_s * samples, ended)

    def _failures(self, samples: int) -> int:
        rate = self._stage.failure_rate
        return sum(self._rng.random() < rate for _ in range(samples)) if rate else 0
