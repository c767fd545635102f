"""A failed reward is retried, then fatal or masked by policy, and never 0 (CPU-10)."""

import asyncio
import math
import pickle

import pytest
import torch

from verst.errors import RewardError
from verst.rewards.calls import CallResult, combine, score_with_policy

MEDIA = torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8)
PROMPTS = ["a", "b"]


class Scorer:
    """Answers its calls one after the other with the given values; an exception is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.num_calls = 0

    async def __call__(self, media, prompts):
        answer = self.answers[min(self.num_calls, len(self.answers) - 1)]
        self.num_calls += 1
        if isinstance(answer, BaseException):
            raise answer
        return answer


def score(call, *, on_failure="stop", attempts=3, timeout_s=30.0):
    return asyncio.run(
        score_with_policy(
            call,
            MEDIA,
            PROMPTS,
            name="ocr",
            attempts=attempts,
            timeout_s=timeout_s,
            on_failure=on_failure,
            backoff_s=0.0,
        )
    )


BUSY = OSError("HTTP 500")


def test_two_failures_and_then_a_score():
    scorer = Scorer(BUSY, BUSY, [0.25, 1])
    assert score(scorer) == CallResult(values=(0.25, 1.0), num_attempts=3)


def test_permanent_failure_stops_with_the_cause():
    scorer = Scorer(BUSY)
    with pytest.raises(RewardError, match="reward ocr failed 3 times, last: OSError: HTTP 500") as caught:
        score(scorer)
    assert scorer.num_calls == 3
    assert caught.value.__cause__ is BUSY
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_permanent_failure_masks_the_microgroup_and_is_counted():
    result = score(Scorer(BUSY), on_failure="mask")
    assert [math.isnan(value) for value in result.values] == [True, True]
    assert (result.num_failures, result.num_non_finite, result.num_attempts) == (1, 0, 3)


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
    async def silent(media, prompts):
        await asyncio.Event().wait()

    with pytest.raises(RewardError, match=r"no answer within 0\.01 s"):
        score(silent, timeout_s=0.01, attempts=2)


def test_cancelling_the_task_is_no_failure_of_the_reward():
    async def run():
        started = asyncio.Event()

        async def silent(media, prompts):
            started.set()
            await asyncio.Event().wait()

        call = score_with_policy(silent, MEDIA, PROMPTS, name="r", attempts=3, timeout_s=30.0, on_failure="mask")
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
            "b": CallResult(values=(math.nan, math.nan), num_attempts=3, num_failures=1),
        }
    )
    assert scores.by_reward["a"] == (1.0, 2.0)
    assert scores.num_failures == 1
