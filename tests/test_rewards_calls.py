"""A failed reward is retried, then fatal or masked by policy, and never 0 (CPU-10)."""

import asyncio
import functools
import math
import pickle

import pytest
import torch

from verst.errors import RewardError
from verst.rewards.base import RewardBatch
from verst.rewards.calls import LONGEST_PAUSE_S, CallResult, attempt, combine, score_with_policy

BATCH = RewardBatch.plain(torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8), ["a", "b"])


class Scorer:
    """Answers its calls one after the other with the given values; an exception is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    @property
    def num_calls(self):
        return len(self.asked)

    async def __call__(self, batch):
        answer = self.answers[min(self.num_calls, len(self.answers) - 1)]
        self.asked.append(batch.prompts)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def score(call, *, on_failure="stop", attempts=3, timeout_s=30.0):
    return asyncio.run(
        score_with_policy(
            functools.partial(attempt, call, timeout_s=timeout_s),
            BATCH,
            name="ocr",
            attempts=attempts,
            on_failure=on_failure,
            backoff_s=0.0,
        )
    )


BUSY = OSError("HTTP 500")


def test_two_failures_and_then_a_score():
    scorer = Scorer(BUSY, BUSY, [0.25, 1])
    assert score(scorer) == CallResult(values=(0.25, 1.0), num_attempts=3)


def test_a_failure_that_stays_stops_with_the_cause():
    scorer = Scorer(BUSY)
    with pytest.raises(RewardError, match="reward ocr failed 3 times, last: OSError: HTTP 500") as caught:
        score(scorer)
    assert scorer.num_calls == 3
    assert caught.value.__cause__ is BUSY
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_failure_that_stays_masks_the_batch_and_is_counted():
    result = score(Scorer(BUSY), on_failure="mask")
    assert [math.isnan(value) for value in result.values] == [True, True]
    assert (result.num_failures, result.num_non_finite, result.num_attempts) == (2, 0, 3)


@pytest.mark.parametrize("answer", [[1.0], [1.0, 2.0, 3.0], []])
def test_a_wrong_count_is_a_failure(answer):
    with pytest.raises(RewardError, match=f"gave {len(answer)} scores for 2 samples"):
        score(Scorer(answer))
    assert score(Scorer(answer, [1.0, 2.0])).values == (1.0, 2.0)


@pytest.mark.parametrize("answer", [["good", 1.0], [None, 1.0], None, 3.0])
def test_what_is_no_list_of_numbers_is_a_failure(answer):
    with pytest.raises(RewardError, match="reward ocr failed 3 times"):
        score(Scorer(answer))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_score_is_masked_and_counted_not_retried(bad):
    scorer = Scorer([0.5, bad])
    result = score(scorer)
    assert result.values[0] == 0.5
    assert math.isnan(result.values[1])
    assert (result.num_non_finite, result.num_failures, scorer.num_calls) == (1, 0, 1)


def test_a_call_without_answer_is_a_failure():
    async def silent(batch):
        await asyncio.Event().wait()

    with pytest.raises(RewardError, match=r"no answer within 0\.01 s"):
        score(silent, timeout_s=0.01, attempts=2)


def test_cancelling_the_task_is_no_failure_of_the_reward():
    async def run():
        started = asyncio.Event()

        async def silent(batch):
            started.set()
            await asyncio.Event().wait()

        ask = functools.partial(attempt, silent, timeout_s=30.0)
        call = score_with_policy(ask, BATCH, name="r", attempts=3, on_failure="mask")
        task = asyncio.create_task(call)
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_combine_keeps_names_and_counts():
    scores = combine(
        {
            "a": CallResult(values=(1.0, 2.0), num_attempts=1),
            "b": CallResult(values=(math.nan, math.nan), num_attempts=3, failed=(0, 1)),
        }
    )
    assert scores.by_reward["a"] == (1.0, 2.0)
    assert scores.num_failures == 2


def late(error, **others):
    for name, value in others.items():
        setattr(error, name, value)
    return error


def test_only_the_samples_that_failed_are_asked_again():
    scorer = Scorer([0.5, RewardError("garbled")], [0.75])
    assert score(scorer) == CallResult(values=(0.5, 0.75), num_attempts=2)
    assert scorer.asked == [("a", "b"), ("b",)]


def test_only_the_samples_that_failed_are_masked():
    result = score(Scorer([0.5, RewardError("garbled")], [RewardError("garbled")]), on_failure="mask")
    assert result.values[0] == 0.5
    assert math.isnan(result.values[1])
    assert (result.num_failures, result.num_attempts) == (1, 3)


def test_a_permanent_error_is_not_asked_again():
    refused = late(RewardError("HTTP 401"), permanent=True)
    scorer = Scorer(refused)
    with pytest.raises(RewardError, match="reward ocr failed for good, last: HTTP 401"):
        score(scorer)
    assert scorer.num_calls == 1
    again = pickle.loads(pickle.dumps(refused))
    assert (again.permanent, again.retry_after_s) == (True, 0.0)
    mixed = Scorer([refused, RewardError("busy")], [0.25])
    result = score(mixed, on_failure="mask")
    assert result.values[1] == 0.25
    assert mixed.asked == [("a", "b"), ("b",)]


def test_the_pause_is_what_a_service_asks_for(monkeypatch):
    pauses = []

    async def noted(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("verst.rewards.calls.sleep", noted)
    score(
        Scorer(late(RewardError("busy"), retry_after_s=7.0), late(RewardError("busy"), retry_after_s=900.0), [1.0, 2.0])
    )
    assert pauses == [7.0, LONGEST_PAUSE_S]
