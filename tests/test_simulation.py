"""The simulation against closed forms, and against the real pipeline on a virtual clock."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import write_recipe
from typer.testing import CliRunner

from verst.cli.main import app
from verst.errors import ConfigError
from verst.obs.events import EventLog
from verst.obs.measured import measure
from verst.obs.simulation import RewardStage, Run, Simulated, Stages, simulate
from verst.obs.spans import FILE, Spans, of, read_spans

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
    assert turns.bottleneck == "turns (engine)"
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


TIMES = """
generate_s = 12.0
transfer_s = 0.5
parse_s = 0.2
train_s = 240.0
sync_s = 2.0
[rewards.brightness]
sample_s = 0.3
"""


def printed(*arguments: str) -> str:
    """Of the command in this process. Raises what it raises."""
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False).output


def plan(folder: Path, times: str, *overrides: str, options: Sequence[str] = ()) -> str:
    """What `verst plan --simulate` prints."""
    (folder / "times.toml").write_text(times)
    recipe = write_recipe(folder, *(changes := (*SIZE, *overrides)))
    source = () if "--from" in options else ("--times", str(folder / "times.toml"))
    return printed("plan", str(recipe), *changes, "--simulate", *source, *options)


SIZE = (
    "rollout.num_groups=48",
    "rollout.group_size=16",
    "rollout.microgroup_size=4",
    "trainer.tile_size=4",
    'rewards=[{type="brightness", workers=2}]',
)
AHEAD = ('schedule={type="async"}', 'algorithm.old_log_probs="recompute"', "algorithm.importance_cap=2.0")


def test_the_command_says_how_long_an_iteration_takes_and_what_to_have(tmp_path: Path) -> None:
    report = json.loads(plan(tmp_path, TIMES, options=["--json", "--gpus", "1,8,1024"]))
    # One engine: 192 microgroups of 12 s; the last of them is parsed and scored (4 samples) after that.
    assert report["recipe"]["rollout_s"] == pytest.approx(192 * 12.0 + 0.5 + 0.2 + 1.2)
    assert report["recipe"]["step_s"] == pytest.approx(report["recipe"]["rollout_s"] + 240.0 + 2.0)
    assert report["recipe"]["bottleneck"] == "engine"
    one, eight, many = report["gpus"]
    assert (
        [row["engines"] for row in report["gpus"]] == [row["trainer_ranks"] for row in report["gpus"]] == [1, 8, 1024]
    )
    assert one["step_s"] > 7 * eight["step_s"] > 49 * many["step_s"] / 10
    # 192 engines make all at once; trainer tiles of 4 of 1536 pairs, 384 of them, go round once on 384 ranks or more.
    assert many["bound_s"]["trainer"] == pytest.approx(240.0 / 384)
    assert many["workers"] == {"brightness": 192}
    text = plan(tmp_path, TIMES, options=["--gpus", "8"])
    assert "an iteration of this recipe" in text
    assert "bound by" in text


def test_an_asynchronous_plan_shares_out_the_gpus(tmp_path: Path) -> None:
    report = json.loads(plan(tmp_path, TIMES, *AHEAD, options=["--json", "--gpus", "1,2,16,1024"]))
    assert [row["gpus"] for row in report["gpus"]] == [2, 16, 1024]  # one GPU cannot be shared out
    _, some, many = report["gpus"]
    assert (some["engines"], some["trainer_ranks"]) == (14, 2)
    assert some["step_s"] == pytest.approx(14 * 12.0 + 2.0, rel=0.01)  # 192 on 14 engines, and the hand-off
    assert many["engines"] == 192
    assert many["engines"] + many["trainer_ranks"] < 1024  # more would change nothing
    assert some["step_s"] > many["step_s"]


def test_a_plan_refuses_what_it_cannot_know(tmp_path: Path) -> None:
    for times, options, message in (
        (TIMES.replace("brightness", "ocr"), (), "rewards brightness are not known, only of: ocr"),
        (TIMES.replace("generate_s", "generate"), (), "generate_s"),
        (TIMES, ("--gpus", "8,x"), "numbers from 1 with commas between"),
        (TIMES, ("--from", str(tmp_path)), "no spans of a rollout"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(tmp_path, times, options=options)
    with pytest.raises(ConfigError, match="--from RUN, a run that was measured, or --times FILE"):
        printed("plan", str(write_recipe(tmp_path)), "--simulate")


def test_stage_times_of_a_run_come_from_its_spans(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events" / FILE)
    spans = Spans(log)
    for rollout, start in ((0, 0.0), (1, 100.0)):
        slow = 9.0 if rollout == 0 else 0.0  # the first one is not representative
        for number in range(4):
            at, engine = start + 2.0 * (number // 2), f"engine:{number % 2}"
            with of(rollout=rollout, group=0, index=4 * number, samples=4):
                spans.add("request", start_s=at - 1, end_s=at + 2.0 + slow, lane=engine, batch=number)
                spans.add("queue", start_s=at - 1, end_s=at, lane=engine, batch=number)
                spans.add("denoise", start_s=at, end_s=at + 1.5 + slow, lane=engine, batch=number)
                spans.add("decode", start_s=at + 1.5, end_s=at + 2.0, lane=engine, batch=number)
                spans.add("transfer", start_s=at + 2.0, end_s=at + 2.25)
                spans.add("parse", start_s=at + 2.25, end_s=at + 2.5, lane=f"parser:{number % 2}")
                for samples in (3, 2):  # one of four was asked about again
                    seconds = 0.1 + 0.2 * samples
                    spans.add("score", start_s=at, end_s=at + seconds, lane="reward/r:0", reward="r", samples=samples)
        iteration = rollout + 1
        spans.add("train", start_s=at + 10, end_s=at + 15 + slow, lane="trainer:0", iteration=iteration)
        spans.add("sync", start_s=at + 15, end_s=at + 16, lane="driver:0", iteration=iteration)
    log.close()
    measured = measure(read_spans(tmp_path))
    assert measured.generate_s == pytest.approx(2.0, abs=1e-4)
    assert (measured.transfer_s, measured.parse_s) == pytest.approx((0.25, 0.25), abs=1e-4)
    assert (measured.train_s, measured.sync_s) == pytest.approx((5.0, 1.0), abs=1e-4)
    assert dataclasses.astuple(measured.rewards["r"]) == pytest.approx((0.1, 0.2, 0.2), abs=1e-4)
