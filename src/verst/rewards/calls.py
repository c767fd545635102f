"""One microgroup's scoring: attempts, time limit, checks, and what a final failure means.

Knows nothing of processes: `call` is a Ray actor's method in a run and a thread in tests.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from verst.errors import RewardError
from verst.types import Scores

log = logging.getLogger(__name__)

Call = Callable[[Tensor, Sequence[str]], Awaitable[Sequence[float]]]


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """What one reward said of one microgroup."""

    values: tuple[float, ...]
    """One a sample; NaN where there is no score."""
    num_attempts: int
    """Calls made; 1 when nothing went wrong."""
    num_failures: int = 0
    """1 when the last attempt failed too and the policy is to mask."""
    num_non_finite: int = 0
    """Values that the reward itself gave as NaN or infinite; masked."""


async def score_with_policy(
    call: Call,
    media: Tensor,
    prompts: Sequence[str],
    *,
    name: str,
    attempts: int,
    timeout_s: float,
    on_failure: Literal["stop", "mask"],
    backoff_s: float = 0.2,
) -> CallResult:
    """Scores of B samples; media: uint8 [B, F, H, W, 3].

    An exception of `call`, a call longer than `timeout_s` and a wrong number of scores are failures: the call is made
    again after backoff_s, 2 backoff_s, ... until `attempts` are used up. Then RewardError ("stop"), or NaN for every
    sample ("mask"). A failure is never a score.
    """
    error: Exception | None = None
    for attempt in range(1, attempts + 1):
        if error is not None:
            await asyncio.sleep(backoff_s * 2 ** (attempt - 2))
        try:
            async with asyncio.timeout(timeout_s):
                values = [float(value) for value in await call(media, prompts)]
            if len(values) != len(prompts):
                raise RewardError(f"gave {len(values)} scores for {len(prompts)} samples")
        except Exception as caught:  # noqa: BLE001 - a reward is foreign code; the last error is the cause of RewardError
            error = caught
            log.warning("reward %s, attempt %d of %d: %s", name, attempt, attempts, _describe(caught, timeout_s))
            continue
        finite = tuple(value if math.isfinite(value) else math.nan for value in values)
        return CallResult(values=finite, num_attempts=attempt, num_non_finite=sum(map(math.isnan, finite)))
    assert error is not None, f"reward {name}: attempts = {attempts}"
    if on_failure == "stop":
        raise RewardError(f"reward {name} failed {attempts} times, last: {_describe(error, timeout_s)}") from error
    return CallResult(values=(math.nan,) * len(prompts), num_attempts=attempts, num_failures=1)


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
