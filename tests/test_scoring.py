"""Pools of reward workers, rewards that compare a group, ranks, and rows that name their rewards: without a process."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch
from loop_fixtures import on_a_loop, on_virtual_time
from test_pipeline import microgroup_of, task_of

from verst.algorithms.advantages import advantages
from verst.cluster.calls import ActorPool
from verst.config.rewards import BrightnessReward, DiversityReward, PythonReward, RewardConfig
from verst.errors import RewardError
from verst.rewards import RewardBatch, make_reward
from verst.rewards.calls import CallResult
from verst.rewards.pool import RewardPool
from verst.rollout.filters import has_zero_variance, weighted_sums
from verst.rollout.plan import MicrogroupTask
from verst.rollout.scoring import Scorer, ranked
from verst.types import Microgroup


def batch_of(*prompts: str, size: int = 2) -> RewardBatch:
    return RewardBatch.plain(torch.zeros(len(prompts), 1, size, size, 3, dtype=torch.uint8), prompts)


class Judge:
    """A reward's call: by default the number in each prompt; remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.busy = 0
        self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, batch: RewardBatch) -> Sequence[float | RewardError]:
        self.calls.append(batch.prompts)
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            await self.gate.wait()
            return [RewardError("unreadable") if p == "bad" else float(p) for p in batch.prompts]
        finally:
            self.busy -= 1


class Paced:
    """A reward whose calls take a time; remembers when each began, and fails for some samples the first time."""

    def __init__(self, seconds: float, *, fail_once: Sequence[str] = ()) -> None:
        self.seconds = seconds
        self.fail_once = set(fail_once)
        self.calls: list[tuple[float, tuple[str, ...]]] = []

    async def __call__(self, batch: RewardBatch) -> Sequence[float | RewardError]:
        self.calls.append((round(asyncio.get_running_loop().time(), 6), batch.prompts))
        await asyncio.sleep(self.seconds)
        failing = self.fail_once & set(batch.prompts)
        self.fail_once -= failing
        return [RewardError("unreadable") if p in failing else float(p) for p in batch.prompts]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def pool_of(judge: Judge, *, deterministic: bool = False, **keys: Any) -> RewardPool:
    return RewardPool(PythonReward(path="a:b", **keys), judge, deterministic=deterministic)


@on_a_loop
async def test_microgroups_share_a_call_when_enough_samples_wait() -> None:
    judge = Judge()
    pool = pool_of(judge, merge_size=4, merge_wait_ms=3_600_000)
    one, two = await asyncio.gather(pool.score(batch_of("1", "2")), pool.score(batch_of("3", "4")))
    assert judge.calls == [("1", "2", "3", "4")]
    assert (one.values, two.values) == ((1.0, 2.0), (3.0, 4.0))


@on_a_loop
async def test_a_sample_waits_for_company_no_longer_than_it_may_and_not_for_other_sizes() -> None:
    judge = Judge()
    pool = pool_of(judge, merge_size=100, merge_wait_ms=1)
    results = await asyncio.gather(*(pool.score(batch_of(str(i), size=s)) for i, s in ((1, 2), (2, 4), (3, 2))))
    assert [result.values for result in results] == [(1.0,), (2.0,), (3.0,)]
    assert sorted(judge.calls) == [("1", "3"), ("2",)]


@on_a_loop
async def test_in_a_shared_call_only_the_sample_that_failed_is_masked_and_counted() -> None:
    judge = Judge()
    pool = pool_of(judge, merge_size=4, attempts=1, on_failure="mask")
    one, two = await asyncio.gather(pool.score(batch_of("1", "2")), pool.score(batch_of("bad", "4")))
    assert (one.values, one.num_failures) == ((1.0, 2.0), 0)
    assert (math.isnan(two.values[0]), two.values[1], two.failed) == (True, 4.0, (0,))


@on_a_loop
async def test_in_a_shared_call_a_final_failure_stops_only_its_own_microgroup() -> None:
    pool = pool_of(Judge(), merge_size=4, attempts=1)
    jobs = [pool.score(batch_of("1", "2")), pool.score(batch_of("bad", "4"))]
    one, two = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(one, CallResult)
    assert "unreadable" in str(two)


@on_virtual_time
async def test_while_all_workers_are_busy_a_call_goes_on_filling_up() -> None:
    judge = Paced(1.0)
    pool = pool_of(judge, merge_size=4, merge_wait_ms=10)

    async def later(seconds: float, *prompts: str) -> CallResult:
        await asyncio.sleep(seconds)
        return await pool.score(batch_of(*prompts))

    await asyncio.gather(*(later(0.2 * i, str(2 * i), str(2 * i + 1)) for i in range(6)))
    # The first waits 10 ms for company; what comes while it is scored fills calls, the last of which is full by then.
    assert judge.calls == [
        (0.01, ("0", "1")),
        (1.01, ("2", "3", "4", "5")),
        (2.01, ("6", "7", "8", "9")),
        (3.01, ("10", "11")),
    ]


@on_virtual_time
async def test_a_batch_larger_than_a_call_is_cut_so_that_idle_workers_help() -> None:
    judge = Paced(1.0)
    pool = pool_of(judge, merge_size=2, workers=2)
    result = await pool.score(batch_of("1", "2", "3", "4", "5"))
    assert judge.calls == [(0.0, ("1", "2")), (0.0, ("3", "4")), (1.0, ("5",))]
    assert result.values == (1.0, 2.0, 3.0, 4.0, 5.0)


@on_virtual_time
async def test_failed_samples_go_before_those_that_came_later() -> None:
    judge = Paced(1.0, fail_once=["2"])
    pool = pool_of(judge, merge_size=1, merge_wait_ms=0)
    results = await asyncio.gather(*(pool.score(batch_of(str(i))) for i in range(6)))
    # 2 fails at 3.0 and comes back after its pause of 0.2 s, when 3 is being scored.
    assert [prompts for _, (prompts,) in judge.calls] == ["0", "1", "2", "3", "2", "4", "5"]
    assert [result.num_attempts for result in results] == [1, 1, 2, 1, 1, 1]


@on_virtual_time
async def test_what_was_given_up_is_not_scored_and_leaves_its_worker() -> None:
    judge = Paced(1.0)
    pool = pool_of(judge, merge_size=2, merge_wait_ms=0)
    jobs = [asyncio.create_task(pool.score(batch_of(f"{2 * i}", f"{2 * i + 1}"))) for i in range(3)]
    await asyncio.sleep(0.5)
    for job in jobs[:2]:
        job.cancel()
    assert (await jobs[2]).values == (4.0, 5.0)
    assert judge.calls == [(0.0, ("0", "1")), (0.5, ("4", "5"))]


@on_a_loop
async def test_rewards_that_compare_a_group_get_it_alone_and_whole() -> None:
    judge = Judge()
    pool = pool_of(judge, merge_size=2, scope="group")
    await asyncio.gather(pool.score(batch_of("1", "2", "3")), pool.score(batch_of("4")))
    assert sorted(judge.calls) == [("1", "2", "3"), ("4",)]


@on_a_loop
async def test_in_a_deterministic_run_calls_are_shared_only_where_it_cannot_matter() -> None:
    for config, calls in (
        (PythonReward(path="a:b", merge_size=4), [("1", "2"), ("3", "4")]),
        (PythonReward(path="a:b", merge_size=4, independent_rows=True), [("1", "2", "3", "4")]),
        (BrightnessReward(merge_size=4), [("1", "2", "3", "4")]),
    ):
        judge = Judge()
        pool = RewardPool(config, judge, deterministic=True)
        await asyncio.gather(pool.score(batch_of("1", "2")), pool.score(batch_of("3", "4")))
        assert judge.calls == calls


@on_a_loop
async def test_no_more_calls_than_workers_and_the_queue_does_not_count_as_time_of_a_call() -> None:
    judge, now = Judge(), [0.0]
    judge.gate.clear()
    config = PythonReward(path="a:b", workers=2, timeout_s=3600.0)
    pool = RewardPool(config, judge, deterministic=False, clock=lambda: now[0])
    jobs = [asyncio.create_task(pool.score(batch_of(str(i)))) for i in range(5)]
    await settle()
    assert len(judge.calls) == 2
    now[0] = 10.0
    judge.gate.set()
    await asyncio.gather(*jobs)
    assert judge.most == 2
    assert pool.metrics() == {
        "perf/reward/python/utilisation": 1.0,  # two workers, ten seconds, busy all the time
        "perf/reward/python/max_queue": 3.0,
        "perf/reward/python/calls": 5.0,
        "perf/reward/python/samples_per_call": 1.0,
    }
    now[0] = 20.0
    assert pool.metrics()["perf/reward/python/utilisation"] == 0.0


class Slow:
    """Like an actor: a call goes on although nobody waits for it any more."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[int]] = []

    def submit(self) -> Awaitable[int]:
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]


@on_a_loop
async def test_a_worker_that_hangs_is_not_asked_first() -> None:
    hung, free = Slow(), Slow()
    pool = ActorPool([hung, free], role="reward")
    job = asyncio.create_task(pool.call(Slow.submit))
    await settle()
    job.cancel()
    await settle()
    for _ in range(3):
        again = asyncio.create_task(pool.call(Slow.submit))
        await settle()
        free.calls[-1].set_result(7)
        assert await again == 7
    assert (len(hung.calls), len(free.calls)) == (1, 3)


class Groupwise:
    """Every sample gets the size of what it was scored with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    async def __call__(self, batch: RewardBatch) -> list[float]:
        self.calls.append(batch.prompts)
        return [float(len(batch))] * len(batch)


def task(group: int, first: int, *prompts: str, **others: Any) -> MicrogroupTask:
    made = task_of(group, first, size=len(prompts))
    return dataclasses.replace(made, prompts=prompts, **others)


def of_evaluation(made: MicrogroupTask) -> MicrogroupTask:
    """The same samples in no group."""
    return dataclasses.replace(made, keys=tuple(dataclasses.replace(key, rollout=-1) for key in made.keys))


def shown(made: MicrogroupTask) -> Microgroup:
    return microgroup_of(made.keys)


GROUP = PythonReward(path="a:b", name="whole", scope="group")
SINGLE = PythonReward(path="a:b", name="single")


def scorer(*pairs: tuple[RewardConfig, Callable[..., Any]], **others: Any) -> Scorer:
    pools = [RewardPool(config, call, deterministic=True) for config, call in pairs]
    return Scorer([config for config, _ in pairs], pools, group_size=4, **others)


@on_a_loop
async def test_a_reward_of_groups_is_called_once_when_the_last_microgroup_is_there() -> None:
    groupwise, judge = Groupwise(), Judge()
    score = scorer((GROUP, groupwise), (SINGLE, judge))
    late, early, other = task(0, 0, "1", "2"), task(0, 2, "3", "4"), task(1, 0, "5", "6")
    jobs = [asyncio.create_task(score(made, shown(made))) for made in (early, other)]
    await settle()
    assert judge.calls == [("3", "4"), ("5", "6")]
    assert groupwise.calls == []
    last = await score(late, shown(late))
    first = await jobs[0]
    assert groupwise.calls == [("1", "2", "3", "4")]  # by index, whatever came first
    assert (first.by_reward, last.by_reward) == (
        {"whole": (4.0, 4.0), "single": (3.0, 4.0)},
        {"whole": (4.0, 4.0), "single": (1.0, 2.0)},
    )
    assert not jobs[1].done()
    jobs[1].cancel()
    again = [task(1, 0, "5", "6"), task(1, 2, "7", "8")]  # what was cancelled leaves nothing behind
    scores = await asyncio.gather(*(score(made, shown(made)) for made in again))
    assert [item.by_reward["whole"] for item in scores] == [(4.0, 4.0)] * 2


@on_a_loop
async def test_a_reward_of_groups_that_fails_fails_all_of_them() -> None:
    async def broken(batch: RewardBatch) -> list[float]:
        raise RewardError("no idea")

    score = scorer((GROUP.model_copy(update={"attempts": 1}), broken))
    jobs = [score(made, shown(made)) for made in (task(0, 0, "1", "2"), task(0, 2, "3", "4"))]
    failures = await asyncio.gather(*jobs, return_exceptions=True)
    assert all("reward whole failed 1 times" in str(failure) for failure in failures)


@on_a_loop
async def test_ranks_stand_in_for_scores_in_training_alone() -> None:
    score = scorer((SINGLE.model_copy(update={"rank": True}), Judge()))
    made = [task(0, 0, "10", "-3"), task(0, 2, "10", "400")]
    one, two = await asyncio.gather(*(score(m, shown(m)) for m in made))
    assert (one.by_reward["single"], two.by_reward["single"]) == ((0.5, 0.0), (0.5, 1.0))
    held_out = of_evaluation(made[0])
    assert (await score(held_out, shown(held_out))).by_reward == {"single": (10.0, -3.0)}


@on_a_loop
async def test_held_out_samples_get_no_score_from_a_reward_of_groups() -> None:
    groupwise = Groupwise()
    score = scorer((GROUP, groupwise), (SINGLE, Judge()))
    made = task(0, 0, "1", "2")
    held_out = of_evaluation(made)
    assert (await score(held_out, shown(held_out))).by_reward == {"single": (1.0, 2.0)}
    assert groupwise.calls == []


def test_ranks_share_ties_and_keep_what_is_missing() -> None:
    assert ranked(CallResult(values=(3.0, 1.0, 2.0), num_attempts=1)).values == (1.0, 0.0, 0.5)
    tied = ranked(CallResult(values=(1.0, math.nan, 1.0, 0.0), num_attempts=1, failed=(1,)))
    assert (tied.values[0], tied.values[2], tied.values[3]) == (0.75, 0.75, 0.0)
    assert math.isnan(tied.values[1])
    assert tied.failed == (1,)
    assert ranked(CallResult(values=(7.0,), num_attempts=1)).values == (0.5,)


@on_a_loop
async def test_a_row_may_name_its_rewards() -> None:
    a, b, gold = (PythonReward(path="a:b", name=name) for name in ("a", "b", "gold"))
    score = scorer((a, Judge()), (b, Judge()), (gold, Judge()), always=["gold"])
    every, only_b = task(0, 0, "1", "2"), task(0, 0, "1", "2", rewards=("b",))
    assert set((await score(every, shown(every))).by_reward) == {"a", "b", "gold"}
    assert set((await score(only_b, shown(only_b))).by_reward) == {"b", "gold"}


def test_a_reward_that_does_not_apply_neither_masks_nor_counts() -> None:
    rewards = {"a": [[0.0, 1.0], None, [1.0, 3.0]], "b": [[5.0, 5.0], [2.0, 0.0], None]}
    weights = {"a": 1.0, "b": 2.0}
    each = advantages(rewards, weights, std="none")
    assert each.values == ((-0.5, 0.5), (2.0, -2.0), (-1.0, 1.0))
    assert each.num_masked == 0
    mixed = advantages(rewards, weights, std="none", mixture="weighted_sum")
    assert mixed.values == ((-0.5, 0.5), (2.0, -2.0), (-1.0, 1.0))
    failed = advantages({"a": [[math.nan, 1.0], None], "b": [[1.0, 2.0], [1.0, 2.0]]}, weights, std="none")
    assert failed.mask == ((False, True), (True, True))
    with pytest.raises(ValueError, match="none applies to a group"):
        advantages({"a": [None, [1.0, 2.0]]}, {"a": 1.0})
    with pytest.raises(ValueError, match="group sizes"):
        advantages({"a": [[1.0]], "b": [[1.0, 2.0]]}, weights)
    assert weighted_sums({"b": (1.0, 2.0)}, weights) == [2.0, 4.0]
    assert has_zero_variance({"b": (1.0, 1.0)}, weights)
    assert not has_zero_variance({"b": (1.0, 2.0)}, weights)


def test_the_deviation_over_a_rollout_is_of_the_groups_a_reward_applies_to() -> None:
    rewards = {"a": [[0.0, 1.0], None, [1.0, 3.0]], "b": [[0.0, 0.0]] * 3}
    result = advantages(rewards, {"a": 1.0, "b": 1.0}, std="batch", epsilon=0.0)
    deviation = float(torch.tensor([0.0, 1.0, 1.0, 3.0], dtype=torch.float64).std(correction=0))
    assert result.values[0] == pytest.approx((-0.5 / deviation, 0.5 / deviation))
    assert result.values[1] == (0.0, 0.0)


def test_diversity_is_the_mean_difference_from_the_others() -> None:
    media = torch.zeros(3, 1, 32, 32, 3, dtype=torch.uint8)
    media[2] = 255
    batch = RewardBatch.plain(media, ["x"] * 3)
    assert make_reward(DiversityReward()).score(batch) == pytest.approx([0.5, 0.5, 1.0])
