"""Dynamic sampling: the same groups whatever the timing, what is begun and cancelled, and what is kept for later."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import HeldServer
from loop_fixtures import on_a_loop
from run_fixtures import recipe_with, tiny_model
from test_pipeline import microgroup_of

from verst.config.recipe import RlRecipe
from verst.engine.client import EngineClient
from verst.engine.wire import Answer, GenerateRequest
from verst.errors import CheckpointError, ConfigError, EngineError
from verst.loops.batch import make_batch
from verst.rollout.ahead import Ahead, position_of
from verst.rollout.dynamic import Collected, collect
from verst.rollout.engines import EnginePool
from verst.rollout.filters import GroupFilters
from verst.rollout.pipeline import Pipeline
from verst.rollout.plan import MicrogroupTask, plan_rollout
from verst.rollout.prompts import PromptSource
from verst.rollout.sampler import Rollout, Sampler, Standing
from verst.types import Microgroup, SampleKey, Scores


class World:
    """Numbers that complete in the order in which `rng` lets them, and a record of what was in flight."""

    def __init__(self, passing: Sequence[bool], rng: random.Random, *, at_once: int = 2) -> None:
        self.passing = passing
        self.at_once = at_once
        self.rng = rng
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self.completed: list[int] = []
        self.cancelled: list[int] = []
        self.most_in_flight = 0

    async def sample(self, number: int) -> int:
        self.waiting[number] = asyncio.get_running_loop().create_future()
        self.most_in_flight = max(self.most_in_flight, len(self.waiting))
        try:
            await self.waiting[number]
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        finally:
            del self.waiting[number]
        self.completed.append(number)
        return number

    async def run(self, **options: Any) -> Collected[int]:
        job = asyncio.create_task(collect(self.sample, lambda number: self.passing[number], **options))
        while not job.done():
            for _ in range(5):  # until what completed has been seen
                await asyncio.sleep(0)
            ready = [number for number, future in self.waiting.items() if not future.done()]
            for number in self.rng.sample(ready, k=min(len(ready), self.rng.randint(1, self.at_once))):
                self.waiting[number].set_result(None)
        return job.result()


def shortest_run(passing: Sequence[bool], wanted: int) -> int:
    return next(n for n in range(len(passing) + 1) if sum(passing[:n]) >= wanted)


@on_a_loop
async def test_in_order_any_timing_gives_the_same_groups() -> None:
    passing = [False, True, False, False, True, True, False, True, True, False, True, True]
    for wanted in (1, 2, 4):
        expected = shortest_run(passing, wanted)
        for extra in (0, 1, 3):
            for seed in range(60):
                world = World(passing, random.Random(seed))
                got = await world.run(wanted=wanted, extra=extra, most=len(passing), in_order=True)
                assert got.judged == tuple(range(expected))
                assert got.consumed == expected
                assert world.most_in_flight <= wanted + extra
                assert not world.waiting
                if extra == 0:  # nothing that is not needed is ever begun
                    assert (got.given_up, world.cancelled) == (0, [])
                    assert sorted(world.completed) == list(range(expected))


@on_a_loop
async def test_out_of_order_the_first_to_complete_count_and_the_rest_is_cancelled() -> None:
    passing = [True, False] * 10
    cancelled = 0
    for seed in range(60):
        world = World(passing, random.Random(seed), at_once=1)
        got = await world.run(wanted=3, extra=2, most=len(passing), in_order=False)
        assert list(got.judged) == world.completed
        assert [sum(passing[number] for number in part) for part in (got.judged, got.judged[:-1])] == [3, 2]
        assert got.consumed == len(world.completed) + len(world.cancelled)
        assert got.given_up == len(world.cancelled)
        cancelled += got.given_up
    assert cancelled > 0


@on_a_loop
async def test_the_bound_ends_it_and_nothing_wanted_begins_nothing() -> None:
    for in_order in (True, False):
        world = World([False, True, False, False, True], random.Random(1))
        got = await world.run(wanted=2, extra=1, most=4, in_order=in_order)
        assert sorted(got.judged) == [0, 1, 2, 3]
        assert (got.consumed, got.given_up) == (4, 0)
        nothing = await World([], random.Random(1)).run(wanted=0, extra=2, most=4, in_order=in_order)
        assert (nothing.judged, nothing.consumed) == ((), 0)


@on_a_loop
async def test_a_failure_cancels_the_rest_and_is_raised() -> None:
    cancelled = []

    async def sample(number: int) -> int:
        if number == 1:
            await asyncio.sleep(0)
            raise EngineError("engine 1 is gone")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return number

    with pytest.raises(EngineError, match="engine 1 is gone"):
        await collect(sample, lambda _: True, wanted=3, extra=0, most=9, in_order=True)
    assert cancelled == [0, 2]


def test_what_is_cancelled_stops_on_the_engine_which_then_serves_the_next() -> None:
    server = HeldServer(tiny_model())
    server.start()
    server.wait_ready(60)

    def task_of(number: int) -> MicrogroupTask:
        request = GenerateRequest(prompt="a cat", seeds=(number,), num_inference_steps=4, height=32, width=32)
        key = SampleKey(rollout=0, group=number, index=0)
        return MicrogroupTask(keys=(key,), prompts=("a cat",), metadata=({},), request=request)

    async def scenario() -> None:
        client = EngineClient(server.url)
        pool = EnginePool([client], per_engine=8)

        async def waiting(number: int) -> None:
            while (await client._http.get("/server_info")).json()["waiting"] != number:
                await asyncio.sleep(0.01)

        async def sample(number: int) -> Answer:
            return await pool.generate(task_of(number))

        job = asyncio.create_task(collect(sample, lambda _: True, wanted=1, extra=2, most=9, in_order=False))
        await asyncio.to_thread(server.worker.begun.wait, 10)
        await waiting(2)
        job.cancel()
        await asyncio.wait({job})
        await waiting(0)
        following = asyncio.create_task(pool.generate(task_of(7)))
        await waiting(1)
        server.worker.go.set()
        assert await following
        assert len(server.worker.batches) == 2  # of the three that were cancelled only the running one had begun
        assert server.worker.batches[1] == [(7,)]
        assert server.worker.num_samples == 1  # and it made no picture
        await pool.close()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        server.worker.go.set()
        server.stop()


class Engines:
    """A pipeline's stages in no particular time; a prompt whose row has `flat` gets equal rewards."""

    def __init__(self, seed: int = 0) -> None:
        self.version = 0
        self.rng = random.Random(seed)
        self.sampled: list[SampleKey] = []

    async def generate(self, task: MicrogroupTask) -> Answer:
        for _ in range(self.rng.randrange(12)):
            await asyncio.sleep(0)
        self.sampled += task.keys
        return Answer(body=json.dumps([self.version, [dataclasses.astuple(key) for key in task.keys]]).encode())

    async def parse(self, answer: Answer, keys: Sequence[SampleKey]) -> Microgroup:
        version, made = json.loads(answer.portable())
        assert [tuple(key) for key in made] == [dataclasses.astuple(key) for key in keys]
        return microgroup_of(keys, version=version)

    async def score(self, task: MicrogroupTask, microgroup: Microgroup) -> Scores:
        values = [
            0.1 if row.get("flat") else 0.1 * key.index for row, key in zip(task.metadata, task.keys, strict=True)
        ]
        return Scores(by_reward={"jpeg_size": tuple(values)})

    def sampler(self, recipe: RlRecipe, source: PromptSource) -> Sampler:
        pipeline = Pipeline(
            generate=self.generate, parse=self.parse, check=lambda *_: None, score=self.score, keep_answers=True
        )
        return Sampler(recipe, source, pipeline, GroupFilters(recipe))

    def ahead(self, recipe: RlRecipe, source: PromptSource) -> Ahead:
        return Ahead(recipe, self.sampler(recipe, source))


FLAT = (True, False, False, True, False, True, False)
"""Rows of the prompt file, which is read over and over."""


def setting(folder: Path, dynamic: str, *overrides: str) -> tuple[RlRecipe, PromptSource]:
    rows = [json.dumps({"prompt": f"p{i}", "flat": flat}) for i, flat in enumerate(FLAT)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    names = (f"prompts.train={folder / 'rows.jsonl'}", "prompts.shuffle=false", f"rollout.dynamic={dynamic}")
    recipe = recipe_with(folder, *names, *overrides)
    return recipe, PromptSource(recipe.prompts.train, seed=recipe.run.seed, shuffle=False)


def trained(rollout: Rollout) -> list[tuple[int, int, str, int]]:
    """(rollout, number, prompt, weights) of the groups that stay."""
    pairs = zip(rollout.groups, rollout.dropped_by, strict=True)
    return [(g.rollout, g.index, g.prompt, g.weight_version) for g, name in pairs if name is None]


async def sample_on(engines: Engines, ahead: Ahead, *numbers: int) -> list[Rollout]:
    """Rollouts, with new weights before each."""
    rollouts = []
    for number in numbers:
        engines.version = number
        ahead.begin(number, weight_version=number)
        rollouts.append(await ahead.take(number))
    return rollouts


@on_a_loop
async def test_without_dynamic_sampling_a_rollout_is_its_plan(tmp_path: Path) -> None:
    recipe, source = setting(tmp_path, "{}")
    engines = Engines()
    first, second = await sample_on(engines, engines.ahead(recipe, source), 0, 1)
    assert [g.prompt for g in (*first.groups, *second.groups)] == ["p0", "p1", "p2", "p3"]
    assert first.dropped_by == ("zero_variance", None)
    assert sorted(engines.sampled[:8]) == [key for task in plan_rollout(recipe, source, 0) for key in task.keys]
    assert dict(first.metrics) == {
        "rollout/staleness_mean": 0.0,
        "rollout/staleness_max": 0.0,
        "rollout/groups_sampled": 2.0,
        "rollout/groups_filtered": 1.0,
        "rollout/groups_used": 1.0,
        "rollout/filtered/zero_variance": 1.0,
    }


@on_a_loop
async def test_the_same_groups_whatever_the_timing_and_nothing_twice(tmp_path: Path) -> None:
    recipe, source = setting(tmp_path, "{enabled=true, extra=2}")
    for seed in range(30):
        engines = Engines(seed)
        rollouts = await sample_on(engines, engines.ahead(recipe, source), 0, 1, 2)
        # p0 and p3 are flat: two that pass are p1, p2; then p4, p6; then p8 = p1, p9 = p2.
        assert [trained(rollout) for rollout in rollouts] == [
            [(0, 1, "p1", 0), (0, 2, "p2", 0)],
            [(1, 1, "p4", 1), (1, 3, "p6", 1)],
            [(2, 1, "p1", 2), (2, 2, "p2", 2)],
        ]
        assert [rollout.metrics["rollout/groups_filtered"] for rollout in rollouts] == [1.0, 2.0, 1.0]
        assert all(rollout.metrics["rollout/groups_missing"] == 0.0 for rollout in rollouts)
        assert len(set(engines.sampled)) == len(engines.sampled)


@on_a_loop
async def test_groups_that_are_left_are_trained_on_next_and_stale_ones_dropped(tmp_path: Path) -> None:
    recipe, source = setting(tmp_path, "{enabled=true, extra=2, staleness=1}")
    for seed in range(20):
        engines = Engines(seed)
        sampler = engines.sampler(recipe, source)
        first, left = await sampler.rollout(0, Standing(), weight_version=0)
        assert trained(first) == [(0, 1, "p1", 0), (0, 2, "p2", 0)]
        assert (first.metrics["rollout/groups_kept"], first.metrics["rollout/groups_cancelled"]) == (2.0, 0.0)
        engines.version = 1
        second, left = await sampler.rollout(1, left, weight_version=1)
        # p4 and p6 were left over; nothing more was wanted for this rollout but two for the next.
        assert trained(second) == [(0, 4, "p4", 0), (0, 6, "p6", 0)]
        assert second.groups[0].weight_version == 0
        assert second.metrics["rollout/groups_kept"] == 2.0
        engines.version = 3  # the kept ones are of version 1
        third, _ = await sampler.rollout(2, left, weight_version=3)
        assert third.metrics["rollout/groups_stale"] == 2.0
        assert [row[3] for row in trained(third)] == [3, 3]


@on_a_loop
async def test_not_deterministic_takes_what_comes_first_and_keeps_what_is_fresh(tmp_path: Path) -> None:
    recipe, source = setting(tmp_path, "{enabled=true, extra=3, staleness=0}", "run.deterministic=false")
    seen = set()
    for seed in range(30):
        engines = Engines(seed)
        (rollout,) = await sample_on(engines, engines.ahead(recipe, source), 0)
        assert len(trained(rollout)) == 2
        assert rollout.metrics["rollout/groups_kept"] == 0.0
        seen.add(tuple(sorted(prompt for _, _, prompt, _ in trained(rollout))))
    assert len(seen) > 1  # timing decides


@on_a_loop
async def test_the_bound_trains_on_what_passed(tmp_path: Path) -> None:
    recipe, source = setting(
        tmp_path, "{enabled=true, max_groups=4}", "rollout.num_groups=4", "trainer.steps_per_rollout=4"
    )
    engines = Engines()
    (rollout,) = await sample_on(engines, engines.ahead(recipe, source), 0)
    assert [prompt for _, _, prompt, _ in trained(rollout)] == ["p1", "p2"]
    assert rollout.metrics["rollout/groups_missing"] == 2.0
    assert rollout.metrics["rollout/groups_sampled"] == 4.0


def saved(ahead: Ahead, iteration: int, folder: Path) -> dict[str, Any]:
    """Its part of a checkpoint in `folder`; the run state as it is read again."""
    for name, content in ahead.files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    state: dict[str, Any] = json.loads(json.dumps({"iteration": iteration, "sampler": ahead.state()}))
    return state


@on_a_loop
async def test_a_sampler_goes_on_from_a_checkpoints_files(tmp_path: Path) -> None:
    recipe, source = setting(tmp_path, "{enabled=true, extra=3, staleness=1}")
    engines = Engines()
    ahead = engines.ahead(recipe, source)
    await sample_on(engines, ahead, 0, 1)
    folder = tmp_path / "checkpoint"
    state = saved(ahead, 2, folder)
    straight = await sample_on(engines, ahead, 2, 3)

    later = Engines(seed=5)
    resumed = later.ahead(recipe, source)
    await resumed.restore(state, folder, later.parse)
    again = await sample_on(later, resumed, 2, 3)
    assert [trained(rollout) for rollout in again] == [trained(rollout) for rollout in straight]
    assert [rollout.metrics for rollout in again] == [rollout.metrics for rollout in straight]
    assert [g.rewards() for r in again for g in r.groups] == [g.rewards() for r in straight for g in r.groups]
    assert resumed.state() == ahead.state()
    assert resumed.files() == ahead.files()

    halves, _ = setting(tmp_path, "{enabled=true, extra=3, staleness=1}", "rollout.microgroup_size=4")
    with pytest.raises(CheckpointError, match="has 2 microgroups, the recipe makes 1"):
        await later.ahead(halves, source).restore(state, folder, later.parse)


@on_a_loop
async def test_a_rollout_that_is_stopped_is_made_again(tmp_path: Path) -> None:
    recipe, source = setting(tmp_path, "{enabled=true, extra=2, staleness=1}")
    engines = Engines()
    ahead = engines.ahead(recipe, source)
    await sample_on(engines, ahead, 0)
    before = (ahead.state(), ahead.files())
    ahead.begin(1, weight_version=1)
    for _ in range(3):
        await asyncio.sleep(0)
    await ahead.settle(below=1)
    assert (ahead.state(), ahead.files()) == before
    (again,) = await sample_on(engines, ahead, 1)
    other = Engines()
    expected = (await sample_on(other, other.ahead(recipe, source), 0, 1))[1]
    assert trained(again) == trained(expected)


def test_a_checkpoint_says_where_among_the_prompts_rollouts_began(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path)
    assert position_of(recipe, {"iteration": 5}, 5) == 10
    assert position_of(recipe, {"iteration": 5}, 7) == 14
    recipe = recipe_with(tmp_path, "rollout.dynamic.enabled=true")
    state = {"iteration": 5, "sampler": {"position": 31, "ahead": [{"number": 5, "end": 40}]}}
    assert [position_of(recipe, state, number) for number in (5, 6)] == [31, 40]
    with pytest.raises(ConfigError, match=r"where among the prompts iteration 8 began: .* it knows of 6, 7"):
        position_of(recipe, state, 7)


@pytest.mark.parametrize("num_groups", [0, 1, 2, 3])
def test_ranks_and_steps_stay_equal_with_fewer_groups(tmp_path: Path, num_groups: int) -> None:
    from trainer_fixtures import groups_of

    recipe = recipe_with(tmp_path, "rollout.num_groups=4", "trainer.steps_per_rollout=2", "trainer.ranks=2")
    batch = make_batch(recipe, groups_of(recipe)[:num_groups])
    assert batch.num_steps == min(num_groups, 2)
    assert [len(share) for share in batch.shares] == [batch.num_steps] * 2
    assert all(blocks for share in batch.shares for blocks in share)
    assert batch.num_pairs == num_groups * 4 * 2
