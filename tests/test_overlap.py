"""The real sampler, pipeline, engine pool and reward pools on a virtual clock: what overlaps, what never waits, and that
the simulation says the same."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from loop_fixtures import VirtualLoop, calls_in, on_virtual_time
from run_fixtures import recipe_with
from test_pipeline import microgroup_of

from verst.config.recipe import RlRecipe
from verst.engine.wire import Answer, GenerateRequest
from verst.errors import RewardError
from verst.obs.simulation import RewardStage, Run, Simulated, Stages, simulate
from verst.rewards.base import RewardBatch
from verst.rewards.pool import RewardPool
from verst.rollout.dynamic import collect
from verst.rollout.engines import EnginePool
from verst.rollout.filters import GroupFilters
from verst.rollout.pipeline import Pipeline
from verst.rollout.prompts import PromptSource
from verst.rollout.sampler import Rollout, Sampler, Standing
from verst.rollout.scoring import Scorer
from verst.types import Microgroup, SampleKey


class Engine:
    """One request at a time, each of a fixed time; remembers when it worked."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._place = asyncio.Semaphore(1)
        self.busy_s = 0.0
        self.last_end = 0.0
        self.most_waiting = self._waiting = 0

    async def generate(self, request: GenerateRequest, **context: Any) -> Answer:
        self._waiting += 1
        self.most_waiting = max(self.most_waiting, self._waiting)
        async with self._place:
            await asyncio.sleep(self._seconds)
        self._waiting -= 1
        self.busy_s += self._seconds
        self.last_end = asyncio.get_running_loop().time()
        return Answer(body=b"")


class Judge:
    """A reward of a fixed time per sample; fails for good or once by the sample's number, and counts what it was asked."""

    def __init__(self, seconds: float, *, fails: Callable[[int, int], bool] = lambda number, attempt: False) -> None:
        self._seconds = seconds
        self._fails = fails
        self.asked: collections.Counter[int] = collections.Counter()
        self.scored: collections.Counter[int] = collections.Counter()

    async def __call__(self, batch: RewardBatch) -> Sequence[float | RewardError]:
        await asyncio.sleep(self._seconds * len(batch))
        return [self._one(int(prompt)) for prompt in batch.prompts]

    def _one(self, number: int) -> float | RewardError:
        self.asked[number] += 1
        if self._fails(number, self.asked[number]):
            return RewardError("is down")
        self.scored[number] += 1
        return float(number)


class World:
    """Engines, one parser and judges around the real thing; one prompt a group whose text is made unique a sample."""

    def __init__(
        self, folder: Path, *, groups: int, engines: int, judges: dict[str, tuple[Judge, dict[str, Any]]]
    ) -> None:
        tables = ", ".join(
            f'{{type="python", path="a:b", name="{name}", on_failure="mask", independent_rows=true, '
            + ", ".join(f"{key}={value}" for key, value in keys.items())
            + "}"
            for name, (_, keys) in judges.items()
        )
        self.recipe: RlRecipe = recipe_with(
            folder,
            f"rollout.num_groups={groups}",
            f"engine.num={engines}",
            f"rewards=[{tables}]",
            "engine.queue_size=8",
        )
        self.engines = [Engine(1.0) for _ in range(engines)]
        pool = EnginePool(self.engines, per_engine=self.recipe.engine.queue_size)  # type: ignore[arg-type]
        self.parser = asyncio.Semaphore(1)
        pools = [RewardPool(config, judges[config.name or ""][0], deterministic=True) for config in self.recipe.rewards]
        scorer = Scorer(self.recipe.rewards, pools, group_size=4)

        async def score(task: Any, microgroup: Microgroup) -> Any:
            names = tuple(str(4 * key.group + key.index) for key in task.keys)
            return await scorer(dataclasses.replace(task, prompts=names), microgroup)

        pipeline = Pipeline(generate=pool.generate, parse=self.parse, check=lambda *_: None, score=score)
        source = PromptSource(self.recipe.prompts.train, seed=0, shuffle=False)
        self.sampler = Sampler(self.recipe, source, pipeline, GroupFilters(self.recipe))

    async def parse(self, answer: Answer, keys: Sequence[SampleKey]) -> Microgroup:
        async with self.parser:
            await asyncio.sleep(0.125)
        return microgroup_of(keys)

    async def rollout(self) -> tuple[Rollout, float]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        rollout, _ = await self.sampler.rollout(0, Standing(), weight_version=0)
        return rollout, loop.time() - started


def flaky(number: int, attempt: int) -> bool:
    """2 % of samples fail the first time, one in 200 always."""
    return number % 200 == 7 or (number % 50 == 3 and attempt == 1)


SLOW = {
    "quick": ({"workers": 1, "merge_size": 4}, 0.05),
    "middle": ({"workers": 6, "merge_size": 1}, 0.5),
    "slow": ({"workers": 48, "merge_size": 1}, 5.0),
}
GROUPS = 128
"""512 samples in 256 microgroups."""


@on_virtual_time
async def test_a_rollout_takes_little_longer_than_its_longest_stage_and_scores_each_sample_once(tmp_path: Path) -> None:
    judges = {name: (Judge(seconds, fails=flaky), keys) for name, (keys, seconds) in SLOW.items()}
    world = World(tmp_path, groups=GROUPS, engines=4, judges=judges)
    rollout, seconds = await world.rollout()
    asked = {name: judge.asked.total() for name, (judge, _) in judges.items()}
    bounds = {name: asked[name] * SLOW[name][1] / keys["workers"] for name, (_, keys) in judges.items()}
    bounds |= {"engine": 256 / 4 * 1.0, "parser": 256 * 0.125}
    assert max(bounds, key=bounds.__getitem__) == "engine"
    assert seconds <= 1.2 * bounds["engine"]  # 64 s, and the last call of 5 s with one repetition
    # Engines never waited for a reward: they worked without a pause from the first moment on.
    assert [engine.busy_s for engine in world.engines] == [engine.last_end for engine in world.engines] == [64.0] * 4
    for judge, _ in judges.values():
        assert judge.scored == {number: 1 for number in range(512) if number % 200 != 7}
        assert [judge.asked[number] for number in (0, 3, 7)] == [1, 2, 3]
    masked = {
        4 * group.index + place
        for group in rollout.groups
        for values in group.rewards().values()
        for place, value in enumerate(values)
        if math.isnan(value)
    }
    assert masked == {7, 207, 407}


def simulated(world: World, judges: dict[str, tuple[Judge, dict[str, Any]]]) -> Simulated:
    rewards = {
        name: RewardStage(
            workers=keys["workers"],
            sample_s=SLOW[name][1],
            merge_size=keys["merge_size"],
            failure_rate=1 - judge.scored.total() / judge.asked.total(),
        )
        for name, (judge, keys) in judges.items()
    }
    run = Run(num_groups=GROUPS, group_size=4, microgroup_size=2)
    stages = Stages(engines=len(world.engines), generate_s=(1.0,), parsers=1, parse_s=(0.125,), rewards=rewards)
    return simulate(run, stages)


@pytest.mark.parametrize(("name", "engines"), [("quick", 2), ("middle", 4), ("slow", 4), ("slow", 8), (None, 4)])
def test_the_simulation_agrees_with_the_pipeline(tmp_path: Path, name: str | None, engines: int) -> None:
    @on_virtual_time
    async def compare() -> None:
        judges = {n: (Judge(s, fails=flaky), keys) for n, (keys, s) in SLOW.items() if name in (n, None)}
        world = World(tmp_path, groups=GROUPS, engines=engines, judges=judges)
        _, seconds = await world.rollout()
        assert simulated(world, judges).rollout_s == pytest.approx(seconds, rel=0.1)

    compare()


@on_virtual_time
async def test_engines_are_never_idle_and_never_hold_more_than_they_may(tmp_path: Path) -> None:
    judges = {"slow": (Judge(500.0), {"workers": 4, "merge_size": 1, "timeout_s": 1000.0})}
    world = World(tmp_path, groups=24, engines=2, judges=judges)
    job = asyncio.create_task(world.rollout())
    await asyncio.sleep(24.5)
    assert [engine.busy_s for engine in world.engines] == [24.0] * 2  # all 48 microgroups, before the first score
    assert [engine.most_waiting for engine in world.engines] == [8, 8]
    assert judges["slow"][0].asked.total() == 0
    job.cancel()


def work_of(make: Callable[[], Coroutine[Any, Any, Any]]) -> int:
    """Function calls that it takes on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return calls_in(lambda: runner.run(make()))


@pytest.mark.parametrize("in_order", [True, False])
def test_the_work_of_collecting_grows_with_the_number_of_groups_alone(in_order: bool) -> None:
    async def sample(number: int) -> int:
        await asyncio.sleep(number * 0.618 % 1)  # one after the other, in no order
        return number

    def work(count: int) -> int:
        return work_of(lambda: collect(sample, lambda _: True, wanted=count, extra=0, most=count, in_order=in_order))

    small, large = work(100), work(1600)
    assert large <= 16 * small * 1.3  # the clock's heap has a logarithm


def test_the_drivers_work_for_a_microgroup_is_the_same_in_a_large_rollout(tmp_path: Path) -> None:
    def work(groups: int) -> float:
        async def run() -> None:
            judges = {"quick": (Judge(0.05), SLOW["quick"][0])}
            await World(tmp_path, groups=groups, engines=4, judges=judges).rollout()

        return work_of(run) / (2 * groups)

    small, large = work(100), work(800)
    assert large <= 1.2 * small
