"""One call's scoring: attempts, time limit, checks, and what a final failure means.

Knows nothing of processes: `call` is a Ray actor's method in a run and a thread in tests.
"""

from __future__ import annotations

import asyncio
import logging
import math
from asyncio import sleep
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from verst.errors import ProcessDied, RewardError
from verst.rewards.base import RewardBatch, Score
from verst.types import Scores

log = logging.getLogger(__name__)

Call = Callable[[RewardBatch], Awaitable[Sequence[Score]]]
Ask = Callable[[RewardBatch], Awaitable[list[Score]]]
"""The same with an error for each sample of a call that failed."""
LONGEST_PAUSE_S = 60.0
"""A service that wants to be left alone for longer is asked again after this all the same."""


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """What one reward said of one batch."""

    values: tuple[float, ...]
    """One a sample; NaN where there is no score."""
    num_attempts: int
    """Calls made; 1 when nothing went wrong."""
    failed: tuple[int, ...] = ()
    """Rows that failed for good and were masked by policy."""

    @property
    def num_failures(self) -> int:
        return len(self.failed)

    @property
    def num_non_finite(self) -> int:
        """Values that the reward itself gave as NaN or infinite; masked."""
        return sum(map(math.isnan, self.values)) - len(self.failed)

    def part(self, start: int, stop: int) -> CallResult:
        """Of the samples start..stop alone."""
        return CallResult(
            values=self.values[start:stop],
            num_attempts=self.num_attempts,
            failed=tuple(row - start for row in self.failed if start <= row < stop),
        )


async def score_with_policy(
    ask: Ask,
    batch: RewardBatch,
    *,
    name: str,
    attempts: int,
    on_failure: Literal["stop", "mask"],
    backoff_s: float = 0.2,
) -> CallResult:
    """Scores of B samples.

    The samples that `ask` gives an error for, and no others, are asked about again after backoff_s, 2 backoff_s, ... (or
    what a service asked for) until `attempts` are used up or an error is permanent. Then RewardError ("stop"), or NaN
    for those samples ("mask"). A failure is never a score.
    """
    scores: list[Score] = [RewardError("was not asked")] * len(batch)
    left = list(range(len(batch)))
    number = 0
    while left and number < attempts:
        number += 1
        asked = batch if len(left) == len(batch) else batch.rows(left)
        for row, score in zip(left, await ask(asked), strict=True):
            scores[row] = score
        errors = [score for score in scores if isinstance(score, RewardError)]
        if errors:
            log.warning("reward %s, attempt %d of %d, %d samples: %s", name, number, attempts, len(errors), errors[-1])
        left = [row for row, score in enumerate(scores) if isinstance(score, RewardError) and not score.permanent]
        if left and number < attempts:
            wanted = max(error.retry_after_s for error in errors)
            await sleep(min(max(backoff_s * 2 ** (number - 1), wanted), LONGEST_PAUSE_S))
    failures = [score for score in scores if isinstance(score, RewardError)]
    if failures and on_failure == "stop":
        last = failures[-1]
        times = "for good" if last.permanent else f"{number} times"
        raise RewardError(f"reward {name} failed {times}, last: {last}") from (last.__cause__ or last)
    values = [math.nan if isinstance(score, RewardError) else float(score) for score in scores]
    return CallResult(
        values=tuple(value if math.isfinite(value) else math.nan for value in values),
        num_attempts=number,
        failed=tuple(row for row, score in enumerate(scores) if isinstance(score, RewardError)),
    )


async def attempt(call: Call, batch: RewardBatch, *, timeout_s: float, limited: bool = True) -> list[Score]:
    """One call: a score or an error for each sample.

    Where the call as a whole failed (an exception, no answer within timeout_s, a wrong number of scores), its error for
    each of them. limited: the time is kept here; else `call` itself raises TimeoutError.
    """
    try:
        async with asyncio.timeout(timeout_s if limited else None):
            answer = await call(batch)
        scores = [score if isinstance(score, RewardError) else float(score) for score in answer]
        if len(scores) != len(batch):
            raise RewardError(f"gave {len(scores)} scores for {len(batch)} samples")
    except ProcessDied:
        # A worker that nobody brings back is the run's failure, not the reward's.
        raise
    except RewardError as error:
        return [error] * len(batch)
    except Exception as error:  # noqa: BLE001 - a reward is foreign code; its error is the cause of RewardError
        failure = RewardError(_describe(error, timeout_s))
        failure.__cause__ = error
        return [failure] * len(batch)
    return scores


def combine(results: Mapping[str, CallResult]) -> Scores:
    """All rewards of one microgroup, by name."""
    return Scores(
        by_reward={name: result.values for name, result in results.items()},
        num_failures=sum(result.num_failures for result in results.values()),
    )


def _describe(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {timeout_s:g} s"
    return f"{type(error).__name__}: {error}"
