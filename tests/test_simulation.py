"""The simulation against closed forms, and against the real pipeline on a virtual clock."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from verst.obs.simulation import RewardStage, Run, Simulated, Stages, simulate

RUN = Run(num_groups=8, group_size=4, microgroup_size=2)
"""16 microgroups of 2."""


def seconds(run: Run = RUN, **stages: Any) -> Simulated:
    return simulate(run, Stages(**{"engines": 1, "generate_s": (1.0,), **stages}))


def use(result: Simulated, name: str) -> tuple[float, float]:
    """Bound and utilisation of a stage."""
    (found,) = (stage for stage in result.stages if stage.name == name)
    return found.bound_s, found.utilisation


def test_one_engine_makes_one_microgroup_after_the_other() -> None:
    result = seconds()
    assert result.rollout_s == result.step_s == 16.0
    assert result.samples_per_s == 2.0
    assert use(result, "engine") == (16.0, 1.0)
    assert (result.bottleneck, result.overlap) == ("engine", 1.0)


@pytest.mark.parametrize(("engines", "expected"), [(2, 8.0), (3, 6.0), (16, 1.0), (1000, 1.0)])
def test_engines_share_the_microgroups_in_waves(engines: int, expected: float) -> None:
    assert seconds(engines=engines).rollout_s == expected


def test_a_pipeline_takes_its_longest_stage_and_the_way_through_the_others() -> None:
    rewards = {"fast": RewardStage(sample_s=0.25), "slow": RewardStage(workers=2, sample_s=1.5)}
    result = seconds(transfer_s=0.125, parse_s=(0.5,), rewards=rewards)
    # The slow reward: 16 calls of 3 s by 2 workers; its first microgroup comes after 1 + 0.125 + 0.5 s, its second a
    # second later, so that the last call ends 8 x 3 s after that.
    assert result.rollout_s == 1.0 + 0.125 + 0.5 + 1.0 + 24.0
    assert result.longest.name == "reward slow"
    assert use(result, "reward slow")[0] == 24.0
    assert use(result, "reward fast")[0] == 8.0
    assert use(result, "parser")[0] == 8.0


def test_turns_add_up_and_an_asynchronous_run_takes_the_longer_of_both() -> None:
    turns = seconds(train_s=10.0, sync_s=2.0)
    assert (turns.step_s, turns.rollout_s, turns.wait_for_rollout_s) == (28.0, 16.0, 16.0)
    assert turns.bottleneck == "engine, in turns"
    ahead = dataclasses.replace(RUN, staleness=1)
    engine_bound = simulate(ahead, Stages(engines=1, generate_s=(1.0,), train_s=10.0, sync_s=2.0), iterations=5)
    assert engine_bound.step_s == 16.0 + 2.0  # engines make nothing while they take weights
    assert engine_bound.bottleneck == "engine"
    trainer_bound = simulate(ahead, Stages(engines=1, generate_s=(1.0,), train_s=40.0, sync_s=2.0), iterations=5)
    assert (trainer_bound.step_s, trainer_bound.wait_for_rollout_s) == (42.0, 0.0)
    assert trainer_bound.bottleneck == "trainer"


def test_rewards_of_the_rollout_before_overlap_with_the_next_one() -> None:
    stages = Stages(engines=1, generate_s=(1.0,), rewards={"slow": RewardStage(sample_s=0.25, call_s=20.0, workers=99)})
    turns, ahead = (simulate(dataclasses.replace(RUN, staleness=k), stages, iterations=6) for k in (0, 1))
    assert turns.step_s == 16.0 + 20.5
    # Two rollouts are on their way: one is generated while the rewards of the one before are waited for.
    assert ahead.step_s < turns.step_s
    assert ahead.rollout_s >= 36.5


def test_calls_fill_up_are_cut_and_go_again() -> None:
    merged = seconds(rewards={"r": RewardStage(call_s=3.0, merge_size=8)})
    # While one call of 3 s runs three microgroups come, which share the next: 1 s + 0.05 s, then waves of 3 s.
    assert merged.rollout_s == pytest.approx(1.0 + 0.05 + 3.0 * 6)
    whole = seconds(engines=16, rewards={"r": RewardStage(workers=32, sample_s=5.0)})
    cut = seconds(engines=16, rewards={"r": RewardStage(workers=32, sample_s=5.0, merge_size=1)})
    assert (whole.rollout_s, cut.rollout_s) == (1.0 + 10.0, 1.0 + 5.0)
    failing = seconds(rewards={"r": RewardStage(workers=99, sample_s=0.5, attempts=3, failure_rate=1.0)})
    assert failing.rollout_s == pytest.approx(16.0 + 3 * 1.0 + 0.2 + 0.4)


def test_a_reward_of_groups_waits_for_the_group() -> None:
    result = seconds(rewards={"g": RewardStage(call_s=4.0, of_group=True, merge_size=1)})
    assert result.rollout_s == 2.0 + 8 * 4.0
    assert use(result, "reward g")[0] == 8 * 4.0


def test_replaced_groups_cost_engine_time() -> None:
    run = dataclasses.replace(RUN, num_groups=200, dynamic=True, pass_rate=0.5)
    result = simulate(run, Stages(engines=4, generate_s=(1.0,)), iterations=4)
    assert use(result, "engine")[0] == pytest.approx(2 * 200 * 2 / 4, rel=0.1)
    ahead = simulate(dataclasses.replace(run, staleness=1), Stages(engines=4, generate_s=(1.0,), train_s=50.0))
    assert ahead.rollout_s == pytest.approx(result.rollout_s, rel=0.2)


RANDOM = Stages(
    engines=3,
    generate_s=(0.5, 1.0, 3.0),
    parsers=2,
    parse_s=(0.1, 0.2),
    rewards={
        "a": RewardStage(workers=3, sample_s=0.5, failure_rate=0.1, merge_size=1),
        "b": RewardStage(workers=2, sample_s=0.2, call_s=0.1, merge_size=6),
    },
    train_s=5.0,
    sync_s=1.0,
)


def test_the_same_input_gives_the_same_result_and_seeds_differ() -> None:
    assert simulate(RUN, RANDOM, seed=1) == simulate(RUN, RANDOM, seed=1)
    assert simulate(RUN, RANDOM, seed=1) != simulate(RUN, RANDOM, seed=2)


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_stage_is_faster_than_its_work_and_more_of_anything_never_hurts_much(staleness: int) -> None:
    run = dataclasses.replace(RUN, num_groups=40, staleness=staleness)
    base = simulate(run, RANDOM, iterations=4)
    assert all(stage.bound_s <= base.step_s * 1.001 for stage in base.stages)
    assert all(0.0 <= stage.utilisation <= 1.001 for stage in base.stages)
    times = [base.step_s]
    for factor in (2, 4, 16):
        rewards = {n: dataclasses.replace(r, workers=r.workers * factor) for n, r in RANDOM.rewards.items()}
        more = dataclasses.replace(RANDOM, engines=3 * factor, parsers=2 * factor, rewards=rewards)
        times.append(simulate(run, more, iterations=4).step_s)
    # What is drawn falls on other microgroups, hence not exactly.
    assert all(later <= earlier * 1.02 for earlier, later in itertools.pairwise(times))
    assert times[-1] < times[0] / 2 or staleness
