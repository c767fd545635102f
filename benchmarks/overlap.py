"""A rollout against the longest of its stages: engines of fixed latency, rewards of 0.05, 0.5 and 5 s a sample.

python benchmarks/overlap.py [--cases quick,middle,slow,mixed] [--out FILE]

What a run rolls out with is real (`rollout_harness`): sampler, pipeline, HTTP and shared memory, parser processes, reward
pools. An engine makes one microgroup at a time in a fixed time; a reward's worker sleeps for each sample, and 2 % of all
samples fail: most of them once, some for good, which are masked after three attempts. The longest stage is

    max(engines: microgroups x latency / engines,
        parsers: seconds that they worked / parsers,
        each reward: samples asked about, repeated ones included, x seconds a sample / workers)

which a rollout cannot beat. `simulated_s` is what `verst plan --simulate` says, of the numbers that stand here and nothing
measured; `from_spans_s` with stage times out of the rollout's own spans.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import logging
import math
import os
import platform
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fake_engines import FakeEngineOptions, FakeEngines
from rollout_harness import Parsers, recipe_of, run_rollout, sample_name

from verst.errors import RewardError
from verst.obs.events import EventLog
from verst.obs.measured import Measured, RewardTimes
from verst.obs.measured import measure as measure_spans
from verst.obs.simulation import RewardStage, Run, Stages, simulate
from verst.obs.spans import FILE, Spans, read_spans
from verst.rewards.base import RewardBatch, Score

PREDICTION = {"rollout_over_longest": 1.10, "simulated_over_rollout_off_by": 0.10}
"""Written down before the first measurement: at most these."""
SECONDS = {"quick": 0.05, "middle": 0.5, "slow": 5.0}
"""Of one sample."""
CALL = {"quick": 16, "middle": 4, "slow": 1}
"""Samples of one call at most (`merge_size`)."""
GROUPS, GROUP_SIZE, MICROGROUP = 64, 16, 4
FAILS_ONCE, FAILS_ALWAYS = 0.016, 0.004
ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    engines: int
    latency_s: float
    workers: dict[str, int]
    """Reward -> its workers."""


CASES = {
    "quick": Case(engines=2, latency_s=0.5, workers={"quick": 1}),
    "middle": Case(engines=2, latency_s=0.5, workers={"middle": 10}),
    "slow": Case(engines=2, latency_s=0.5, workers={"slow": 32}),
    "mixed": Case(engines=2, latency_s=1.25, workers={"quick": 1, "middle": 5, "slow": 48}),
}


class Judge:
    """Every worker of one reward. Whether a sample fails follows from its name alone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.asked: collections.Counter[str] = collections.Counter()
        self.scored: collections.Counter[str] = collections.Counter()

    async def __call__(self, batch: RewardBatch) -> Sequence[Score]:
        await asyncio.sleep(SECONDS[self._name] * len(batch))
        return [self._score(name) for name in batch.prompts]

    def _score(self, name: str) -> Score:
        self.asked[name] += 1
        luck = random.Random(f"{self._name} {name}").random()
        if luck < FAILS_ALWAYS or (luck < FAILS_ALWAYS + FAILS_ONCE and self.asked[name] == 1):
            return RewardError("the service is down")
        self.scored[name] += 1
        return luck


def recipe_for(case: Case, folder: Path) -> Any:
    rewards = ", ".join(
        f'{{type="python", path="a:b", name="{name}", workers={workers}, merge_size={CALL[name]}, independent_rows=true, '
        f'attempts={ATTEMPTS}, on_failure="mask"}}'
        for name, workers in case.workers.items()
    )
    return recipe_of(
        f"run.folder={folder}",
        f"rollout.num_groups={GROUPS}",
        f"rollout.group_size={GROUP_SIZE}",
        f"rollout.microgroup_size={MICROGROUP}",
        f"trainer.tile_size={MICROGROUP}",
        "rollout.parsers.num=2",
        f"engine.num={case.engines}",
        f"rewards=[{rewards}]",
    )


def simulated_s(case: Case, times: Measured) -> float:
    rewards = {
        name: RewardStage(
            workers=workers, merge_size=CALL[name], attempts=ATTEMPTS, **dataclasses.asdict(times.rewards[name])
        )
        for name, workers in case.workers.items()
    }
    stages = Stages(
        engines=case.engines,
        generate_s=(times.generate_s,),
        transfer_s=times.transfer_s,
        parsers=2,
        parse_s=(times.parse_s,),
        rewards=rewards,
    )
    return simulate(Run(num_groups=GROUPS, group_size=GROUP_SIZE, microgroup_size=MICROGROUP), stages).rollout_s


def nominal(case: Case) -> Measured:
    """What is known before anything was measured."""
    rewards = {
        name: RewardTimes(call_s=0.0, sample_s=SECONDS[name], failure_rate=FAILS_ONCE + FAILS_ALWAYS)
        for name in case.workers
    }
    return Measured(generate_s=case.latency_s, transfer_s=0.0, parse_s=0.0, rewards=rewards, train_s=0.0, sync_s=0.0)


def measure(name: str, parsers: Parsers, folder: Path) -> dict[str, Any]:
    case = CASES[name]
    recipe = recipe_for(case, folder)
    options = FakeEngineOptions(
        number=case.engines,
        latency_s=case.latency_s,
        latent=(16, 32, 32),
        frames=(1, 256, 256, 3),
        shared_bytes=2 * 2**30,
    )
    before = simulated_s(case, nominal(case))
    judges = {reward: Judge(reward) for reward in case.workers}
    log = EventLog(folder / name / "events" / FILE, flush_s=1.0)
    spans = Spans(log)
    parsers.busy_s = 0.0
    with FakeEngines(options) as engines:
        rollout, seconds = run_rollout(recipe, engines.urls, parsers, judges, spans)
    log.close()
    microgroups = GROUPS * GROUP_SIZE // MICROGROUP
    times = measure_spans(read_spans(folder / name))
    stages = {
        "engine": microgroups * case.latency_s / case.engines,
        "parser": parsers.busy_s / recipe.rollout.parsers.num,
        **{r: judges[r].asked.total() * SECONDS[r] / workers for r, workers in case.workers.items()},
    }
    longest = max(stages, key=stages.__getitem__)
    from_spans = simulated_s(case, times)
    result = {
        "engines": case.engines,
        "latency_s": case.latency_s,
        "workers": case.workers,
        "samples_of_a_call": {reward: CALL[reward] for reward in case.workers},
        "stages_s": stages,
        "longest": longest,
        "rollout_s": seconds,
        "last_generated_s": rollout.seconds.last_generated,
        "rollout_over_longest": seconds / stages[longest],
        "simulated_s": before,
        "simulated_over_rollout": before / seconds,
        "from_spans_s": from_spans,
        "from_spans_over_rollout": from_spans / seconds,
        "measured": dataclasses.asdict(times),
        "samples": check_counts(rollout, judges),
    }
    print(f"{name:7} {line(result)}", flush=True)
    return result


def check_counts(rollout: Any, judges: dict[str, Judge]) -> dict[str, Any]:
    """Every sample has one score of each reward, or was masked after all attempts; raises where that is not so."""
    names = {sample_name(sample.key) for group in rollout.groups for sample in group.samples}
    assert len(names) == GROUPS * GROUP_SIZE
    counts: dict[str, Any] = {}
    for reward, judge in judges.items():
        values = {
            sample_name(sample.key): value
            for group in rollout.groups
            for sample, value in zip(group.samples, group.rewards()[reward], strict=True)
        }
        masked = {name for name, value in values.items() if math.isnan(value)}
        assert set(judge.asked) == names
        assert judge.scored == dict.fromkeys(names - masked, 1)
        assert all(judge.asked[name] == ATTEMPTS for name in masked)
        counts[reward] = {
            "scored_once": len(judge.scored),
            "masked": len(masked),
            "asked_again": sum(1 for n in judge.asked.values() if n > 1),
        }
    return counts


def line(result: dict[str, Any]) -> str:
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result["stages_s"].items())
    return (
        f"rollout {result['rollout_s']:6.1f} s = {result['rollout_over_longest']:.3f} x {result['longest']} "
        f"(stages, s: {stages}); last answer at {result['last_generated_s']:.1f} s; simulated {result['simulated_s']:.1f} s "
        f"({result['simulated_over_rollout']:.3f}), from spans {result['from_spans_s']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/overlap.json")
    arguments = parser.parse_args()
    # Each of the failures that are meant to be would be a line.
    logging.getLogger("verst.rewards.calls").setLevel(logging.ERROR)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        parsers = Parsers(recipe_for(CASES["quick"], Path(folder)))
        try:
            for name in arguments.cases.split(","):
                results[name] = measure(name, parsers, Path(folder))
        finally:
            parsers.close()
    ratios = {
        "rollout_over_longest": max(r["rollout_over_longest"] for r in results.values()),
        "simulated_over_rollout_off_by": max(abs(r["simulated_over_rollout"] - 1) for r in results.values()),
    }
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "longest_stage": "max(microgroups x latency / engines, parser seconds / parsers, samples asked about x seconds / workers)",
        "rollout": {"groups": GROUPS, "group_size": GROUP_SIZE, "microgroup_size": MICROGROUP},
        "prediction": PREDICTION,
        "worst": ratios,
        "met": {name: ratios[name] <= PREDICTION[name] for name in PREDICTION},
        "cases": results,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"prediction": PREDICTION, "worst": ratios}))


if __name__ == "__main__":
    main()
