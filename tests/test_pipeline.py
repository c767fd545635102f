"""The microgroup pipeline, what a rollout consists of, and the pool of engines: all without a process."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_fixtures import on_a_loop
from run_fixtures import WORDS, recipe_with

from verst.engine.wire import Answer, GenerateRequest
from verst.errors import EchoError, EngineError, InvariantError, RewardError, SyncError
from verst.flow.noise import derive_seed
from verst.loops.batch import make_batch
from verst.loops.rl import heldout_metrics, heldout_rewards, reward_metrics
from verst.rollout.columns import Overrides
from verst.rollout.engines import EnginePool
from verst.rollout.pipeline import Pipeline, ScoredMicrogroup, assemble, in_prompt_order, raise_first
from verst.rollout.plan import MicrogroupTask, plan_evaluation, plan_rollout
from verst.rollout.prompts import Prompt, PromptSource
from verst.rollout.scoring import reward_batch
from verst.types import Conditioning, Microgroup, Sample, SampleKey, Scores


def task_of(group: int, first: int, size: int = 2) -> MicrogroupTask:
    keys = tuple(SampleKey(rollout=0, group=group, index=first + i) for i in range(size))
    request = GenerateRequest(prompt=f"prompt {group}", seeds=tuple(range(size)))
    return MicrogroupTask(keys=keys, prompts=(f"prompt {group}",) * size, metadata=({},) * size, request=request)


def microgroup_of(keys: Sequence[SampleKey], *, version: int = 0) -> Microgroup:
    samples = tuple(
        Sample(
            key=key,
            prompt=f"prompt {key.group}",
            seed=key.index,
            initial_seed=key.index,
            weight_version=version,
            media=torch.zeros(1, 2, 2, 3, dtype=torch.uint8),
            fps=None,
            streams={},
        )
        for key in keys
    )
    return Microgroup(samples=samples, conditioning=Conditioning(positive={}, negative=None), echo={})


def scores_of(microgroup: Microgroup) -> Scores:
    return Scores(by_reward={"made_up": tuple(10.0 * s.key.group + s.key.index for s in microgroup.samples)})


ANSWER = Answer(body=b"answer")


class Stages:
    """Fakes of the three processes that the pipeline waits for; a test changes what one of them does."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.scored: list[tuple[int, int]] = []
        self.cancelled: list[tuple[int, int]] = []

    async def generate(self, task: MicrogroupTask) -> Answer:
        place = (task.group, task.keys[0].index)
        self.begun.append(place)
        try:
            await self.wait(task)
        except asyncio.CancelledError:
            self.cancelled.append(place)
            raise
        return ANSWER

    async def wait(self, task: MicrogroupTask) -> None:
        await asyncio.sleep(0)

    async def parse(self, answer: Answer, keys: Sequence[SampleKey]) -> Microgroup:
        assert answer is ANSWER
        return microgroup_of(keys)

    def check(self, task: MicrogroupTask, microgroup: Microgroup, weight_version: int) -> None:
        pass

    async def score(self, task: MicrogroupTask, microgroup: Microgroup) -> Scores:
        key = microgroup.samples[0].key
        self.scored.append((key.group, key.index))
        return scores_of(microgroup)

    def pipeline(self, **others: Any) -> Pipeline:
        stages = {"generate": self.generate, "parse": self.parse, "check": self.check, "score": self.score}
        return Pipeline(**{**stages, **others})


TASKS = [task_of(group, first) for group in range(3) for first in (0, 2)]
PLACES = [(task.group, task.keys[0].index) for task in TASKS]


@on_a_loop
async def test_results_come_in_task_order_whatever_the_completion_order() -> None:
    turns = {place: asyncio.Event() for place in PLACES}
    finished: list[tuple[int, int]] = []

    class LastFirst(Stages):
        async def wait(self, task: MicrogroupTask) -> None:
            place = (task.group, task.keys[0].index)
            if place != PLACES[-1]:
                await turns[place].wait()
            finished.append(place)
            if PLACES.index(place) > 0:
                turns[PLACES[PLACES.index(place) - 1]].set()

    stages = LastFirst()
    scored, seconds = await stages.pipeline().run(TASKS, weight_version=0)
    assert finished == PLACES[::-1]
    assert [item.task for item in scored] == TASKS
    assert [item.scores.by_reward["made_up"] for item in scored][:3] == [(0.0, 1.0), (2.0, 3.0), (10.0, 11.0)]
    assert all(item.microgroup.samples[0].key == item.task.keys[0] for item in scored)
    assert sorted(stages.scored) == PLACES
    assert 0.0 <= seconds.last_generated <= seconds.total


@on_a_loop
async def test_first_failure_comes_by_itself_and_the_others_are_cancelled() -> None:
    class OneDies(Stages):
        async def wait(self, task: MicrogroupTask) -> None:
            if task is TASKS[2]:
                await asyncio.sleep(0)
                raise EngineError("engine 1 is gone")
            await asyncio.Event().wait()

    stages = OneDies()
    with pytest.raises(EngineError, match=r"^engine 1 is gone$"):
        await stages.pipeline().run(TASKS, weight_version=0)
    assert sorted(stages.cancelled) == [place for place in PLACES if place != PLACES[2]]
    assert stages.scored == []


@on_a_loop
async def test_failing_reward_and_failing_check_stop_the_rollout() -> None:
    async def broken(task: MicrogroupTask, microgroup: Microgroup) -> Scores:
        raise RewardError("reward made_up failed 3 times")

    def suspicious(task: MicrogroupTask, microgroup: Microgroup, weight_version: int) -> None:
        raise EchoError("guidance_scale: 1.0 was asked for, the engine used 7.0")

    with pytest.raises(RewardError, match="made_up"):
        await Stages().pipeline(score=broken).run(TASKS, weight_version=0)
    stages = Stages()
    with pytest.raises(EchoError, match="guidance_scale"):
        await stages.pipeline(check=suspicious).run(TASKS, weight_version=0)
    assert stages.scored == []  # what is not what was asked for is never scored


@on_a_loop
async def test_slow_reward_does_not_hold_generation() -> None:
    release = asyncio.Event()

    async def slow(task: MicrogroupTask, microgroup: Microgroup) -> Scores:
        await release.wait()
        return scores_of(microgroup)

    stages = Stages()
    engine = pool_of(FakeClient("one", answers=ANSWER), per_engine=1)

    async def generate(task: MicrogroupTask) -> Answer:
        await stages.generate(task)
        return await engine.generate(task)

    parsed: list[SampleKey] = []

    async def parse(answer: Answer, keys: Sequence[SampleKey]) -> Microgroup:
        parsed.append(keys[0])
        return await stages.parse(answer, keys)

    run = asyncio.create_task(stages.pipeline(generate=generate, parse=parse, score=slow).run(TASKS, weight_version=0))
    while len(parsed) < len(TASKS):
        await asyncio.sleep(0)  # would hang if generation, or the one place of the engine, waited for a score
    assert not run.done()
    release.set()
    scored, _ = await run
    assert len(scored) == len(TASKS)


def scored_of(*tasks: MicrogroupTask) -> list[ScoredMicrogroup]:
    microgroups = [microgroup_of(task.keys) for task in tasks]
    return [
        ScoredMicrogroup(task=task, microgroup=microgroup, scores=scores_of(microgroup))
        for task, microgroup in zip(tasks, microgroups, strict=True)
    ]


def test_assemble_orders_groups_and_samples() -> None:
    groups = assemble(scored_of(task_of(1, 2), task_of(0, 0), task_of(1, 0), task_of(0, 2)), group_size=4)
    assert [group.index for group in groups] == [0, 1]
    assert [[s.key.index for s in group.samples] for group in groups] == [[0, 1, 2, 3]] * 2
    assert groups[1].rewards() == {"made_up": (10.0, 11.0, 12.0, 13.0)}
    assert groups[1].prompt == "prompt 1"


@pytest.mark.parametrize(
    "tasks",
    [
        [task_of(0, 0), task_of(0, 2), task_of(1, 0)],  # a hole at the end
        [task_of(0, 0), task_of(0, 2), task_of(1, 2)],  # at the beginning
        [task_of(0, 0), task_of(0, 2), task_of(1, 0), task_of(1, 0)],  # one twice
    ],
)
def test_assemble_refuses_a_hole(tasks: list[MicrogroupTask]) -> None:
    with pytest.raises(InvariantError, match=r"group 1 holds samples .*must be 0\.\.3"):
        assemble(scored_of(*tasks), group_size=4)


def plan_of(folder: Path, *overrides: str, rollout: int = 0) -> list[MicrogroupTask]:
    folder.mkdir(exist_ok=True)
    recipe = recipe_with(folder, *overrides)
    source = PromptSource(recipe.prompts.train, seed=recipe.run.seed, shuffle=recipe.prompts.shuffle)
    return plan_rollout(recipe, source, rollout)


def seeds_of(tasks: Sequence[MicrogroupTask]) -> dict[SampleKey, int]:
    return {key: seed for task in tasks for key, seed in zip(task.keys, task.request.sample_seeds(), strict=True)}


def test_768_distinct_seeds_that_depend_on_nothing_else(tmp_path: Path) -> None:
    big = ("rollout.num_groups=48", "rollout.group_size=16")
    seeds = seeds_of(plan_of(tmp_path, *big, "rollout.microgroup_size=16", "trainer.tile_size=16"))
    assert len(seeds) == 48 * 16
    assert len(set(seeds.values())) == 768
    for micro in (2, 4, 8):
        sizes = (f"rollout.microgroup_size={micro}", f"trainer.tile_size={micro}")
        assert seeds_of(plan_of(tmp_path, *big, *sizes, "engine.num=4")) == seeds
    other = seeds_of(plan_of(tmp_path, *big, "rollout.microgroup_size=16", "trainer.tile_size=16", rollout=1))
    assert not set(other.values()) & set(seeds.values())
    changed = seeds_of(plan_of(tmp_path, *big, "run.seed=4"))
    assert not set(changed.values()) & set(seeds.values())


def test_shared_initial_noise_is_one_seed_a_group(tmp_path: Path) -> None:
    tasks = plan_of(tmp_path, "rollout.num_groups=8")
    by_group: dict[int, set[int]] = {}
    for task in tasks:
        assert task.request.initial_seeds is not None
        by_group.setdefault(task.group, set()).update(task.request.initial_seeds)
    assert [len(seeds) for seeds in by_group.values()] == [1] * 8
    assert len(set().union(*by_group.values())) == 8
    assert all(t.request.initial_seeds is None for t in plan_of(tmp_path, "sampling.shared_initial_noise=false"))


def test_windows_are_drawn_per_group_and_shared_by_its_microgroups(tmp_path: Path) -> None:
    tasks = plan_of(tmp_path, "rollout.num_groups=16", "rollout.group_size=8")
    windows: dict[int, set[tuple[int, ...]]] = {}
    for task in tasks:
        steps = task.request.rollout_sde_step_indices
        assert steps is not None
        windows.setdefault(task.group, set()).add(steps)
        assert task.request.rollout_return_step_indices == (*steps, steps[-1] + 1)
    assert len(tasks) == 16 * 4
    assert all(len(drawn) == 1 for drawn in windows.values())
    assert set().union(*windows.values()) == {(0, 1), (1, 2)}  # size 2 inside [0, 3)


def test_rollouts_walk_through_the_prompts(tmp_path: Path) -> None:
    seen = [task.prompts[0] for rollout in range(4) for task in plan_of(tmp_path, rollout=rollout)[::2]]
    assert sorted(seen) == sorted(WORDS)


def test_evaluation_is_fixed(tmp_path: Path) -> None:
    prompts = [Prompt(text=text, index=i) for i, text in enumerate(("one", "two", "three"))]
    plan = plan_evaluation(recipe_with(tmp_path), prompts)
    assert [task.request.prompts for task in plan] == [("one", "two"), ("three",)]
    assert all(not task.request.rollout for task in plan)
    again = plan_evaluation(recipe_with(tmp_path, "run.seed=9", "eval.batch_size=1"), prompts)
    assert seeds_of(again) == seeds_of(plan)
    assert len(set(seeds_of(plan).values())) == 3


def test_a_prompt_with_a_picture_has_a_request_of_its_own(tmp_path: Path) -> None:
    rows: list[tuple[str, ...]] = [(), ("a.png",), ("b.png", "c.png"), (), ()]
    prompts = [Prompt(text=f"p{i}", index=i, images=row, metadata={"n": i}) for i, row in enumerate(rows)]
    plan = plan_evaluation(recipe_with(tmp_path), prompts)
    assert [task.request.prompts for task in plan] == [("p0", "p3"), ("p1",), ("p2",), ("p4",)]
    assert [task.request.image_path for task in plan] == [None, ["a.png"], ["b.png", "c.png"], None]
    assert [[key.group for key in task.keys] for task in plan] == [[0, 3], [1], [2], [4]]
    assert [[row["n"] for row in task.metadata] for task in plan] == [[0, 3], [1], [2], [4]]


def test_held_out_prompts_share_a_request_only_with_their_like_and_come_back_in_order(tmp_path: Path) -> None:
    wide, short = Overrides(width=128), Overrides(num_steps=2, seed=5)
    kinds = [wide, short, wide, Overrides(num_steps=2, seed=6), Overrides(), wide]
    prompts = [Prompt(text=f"p{i}", index=i, overrides=kind) for i, kind in enumerate(kinds)]
    plan = plan_evaluation(recipe_with(tmp_path), prompts)
    assert [task.request.prompts for task in plan] == [("p0", "p2"), ("p1", "p3"), ("p4",), ("p5",)]
    assert [(task.request.width, task.request.num_inference_steps) for task in plan] == [
        (128, 4),
        (64, 2),
        (64, 4),
        (128, 4),
    ]
    seeds = {key.group: seed for key, seed in seeds_of(plan).items()}
    assert seeds[1] == derive_seed(5, "eval", 1)  # the row's own seed stands for eval.seed
    assert seeds[0] == derive_seed(0, "eval", 0)
    scored = scored_of(*plan)
    places = [float(key.group) for item in scored for key in item.task.keys]
    assert places == [0.0, 2.0, 1.0, 3.0, 4.0, 5.0]
    assert in_prompt_order(scored, places) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_rewards_see_the_samples_and_their_rows() -> None:
    task = task_of(0, 0)
    task = MicrogroupTask(keys=task.keys, prompts=task.prompts, metadata=({"a": 1}, {"a": 2}), request=task.request)
    plain = microgroup_of(task.keys)
    sounding = [
        dataclasses.replace(sample, fps=8.0, audio=torch.full((1, 4), i / 2), sample_rate=100)
        for i, sample in enumerate(plain.samples)
    ]
    batch = reward_batch(task, dataclasses.replace(plain, samples=tuple(sounding)))
    assert (batch.prompts, batch.metadata) == (task.prompts, task.metadata)
    assert (batch.fps, batch.sample_rate, list(batch.media.shape)) == (8.0, 100, [2, 1, 2, 2, 3])
    assert batch.audio is not None
    assert batch.audio[:, 0, 0].tolist() == [0.0, 0.5]
    silent = reward_batch(task, plain)
    assert (silent.fps, silent.audio, silent.sample_rate) == (None, None, None)
    mixed = dataclasses.replace(plain, samples=(plain.samples[0], sounding[1]))
    with pytest.raises(EngineError, match="unlike sizes or rates"):
        reward_batch(task, mixed)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"media": torch.zeros(1, 2, 2, 3)}, "uint8 in 0..255, got torch.float32"),
        ({"media": torch.zeros(3, 2, 2, dtype=torch.uint8)}, r"shape \[B, F, H, W, 3\], got \[2, 3, 2, 2\]"),
        ({"media": torch.zeros(0, 2, 2, 3, dtype=torch.uint8)}, r"got \[2, 0, 2, 2, 3\]"),
        ({"fps": 0.0}, "fps above 0 or None, got 0.0"),
        ({"fps": math.nan}, "fps above 0 or None, got nan"),
        ({"audio": torch.zeros(2, 7)}, "audio and sample_rate together"),
    ],
)
def test_media_that_break_the_contract_reach_no_reward(wrong: dict[str, Any], message: str) -> None:
    task = task_of(0, 0)
    plain = microgroup_of(task.keys)
    samples = tuple(dataclasses.replace(sample, **wrong) for sample in plain.samples)
    with pytest.raises(RewardError, match=message):
        reward_batch(task, dataclasses.replace(plain, samples=samples))


class FakeClient:
    """Answers when told to, and counts; refuses weights when told so."""

    def __init__(self, name: str, *, refuses: bool = False, answers: Answer | None = None) -> None:
        self.name = name
        self.answers = answers
        self.refuses = refuses
        self.waiting: list[asyncio.Event] = []
        self.versions: list[int] = []
        self.closed = False

    async def generate(self, request: GenerateRequest, *, weight_version: int | None = None) -> Answer:
        if self.answers is not None:
            return self.answers
        done = asyncio.Event()
        self.waiting.append(done)
        await done.wait()
        return Answer(body=self.name.encode())

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        if self.refuses:
            raise SyncError(f"engine {self.name} took no weights")
        self.versions.append(manifest["version"])

    async def close(self) -> None:
        self.closed = True


def pool_of(*clients: FakeClient, per_engine: int) -> EnginePool:
    return EnginePool(clients, per_engine=per_engine)  # type: ignore[arg-type]


@on_a_loop
async def test_least_loaded_engine_is_asked_and_no_more_than_it_may_hold() -> None:
    one, two = FakeClient("one"), FakeClient("two")
    pool = pool_of(one, two, per_engine=2)
    jobs = [asyncio.create_task(pool.generate(task_of(0, 0))) for _ in range(6)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert (len(one.waiting), len(two.waiting)) == (2, 2)  # the other two wait for a place
    for done in two.waiting:
        done.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert (len(one.waiting), len(two.waiting)) == (2, 4)  # the free engine got them
    for done in (*one.waiting, *two.waiting):
        done.set()
    bodies = [answer.body for answer in await asyncio.gather(*jobs)]
    assert sorted(bodies) == [b"one"] * 2 + [b"two"] * 4


@on_a_loop
async def test_weights_go_to_every_engine_or_it_is_an_error() -> None:
    one, two, bad = FakeClient("one"), FakeClient("two"), FakeClient("bad", refuses=True)
    pool = pool_of(one, two, per_engine=1)
    assert await pool.sync({"version": 5, "digest": "d"}) == "d"
    assert (one.versions, two.versions) == ([5], [5])
    mixed = pool_of(one, bad, per_engine=1)
    with pytest.raises(SyncError, match="engine bad"):
        await mixed.sync({"version": 6, "digest": "d"})
    await pool.close()
    assert one.closed
    assert two.closed


@on_a_loop
async def test_engines_that_have_a_request_take_no_weights() -> None:
    client = FakeClient("one")
    pool = pool_of(client, per_engine=2)
    job = asyncio.create_task(pool.generate(task_of(0, 0)))
    await asyncio.sleep(0)
    with pytest.raises(InvariantError, match="weights of version 6 while 1 requests are at the engines"):
        await pool.sync({"version": 6, "digest": "d"})
    client.waiting[0].set()
    await job
    await pool.sync({"version": 6, "digest": "d"})
    assert client.versions == [6]


@on_a_loop
async def test_samples_of_other_weights_are_refused() -> None:
    pool = pool_of(FakeClient("one"), per_engine=1)
    task = task_of(0, 0)
    echo = {**task.request.model_dump(mode="json"), "prompts": list(task.prompts), "num_outputs_per_prompt": 2}
    echo |= {"seeds": [0, 1], "initial_seeds": [0, 1], "truncated_prompts": 0, "weight_version": 3}
    right, stale = microgroup_of(task.keys, version=3), microgroup_of(task.keys, version=2)
    pool.check(task, Microgroup(samples=right.samples, conditioning=right.conditioning, echo=echo), 3)
    with pytest.raises(EchoError, match=r"weight version \[2\] came back, expected 3"):
        pool.check(task, Microgroup(samples=stale.samples, conditioning=stale.conditioning, echo=echo), 3)
    other = {**echo, "weight_version": 2}
    with pytest.raises(EchoError, match="weight_version"):
        pool.check(task, Microgroup(samples=right.samples, conditioning=right.conditioning, echo=other), 3)


def test_prompts_that_were_cut_are_counted_once_a_group_and_once_a_request(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, 'model.long_prompts="truncate"')
    tasks = [task_of(group, first) for group in range(3) for first in (0, 2)]
    scored = []
    for item, cut in zip(scored_of(*tasks), (1, 1, 0, 0, 2, 2), strict=True):
        microgroup = dataclasses.replace(item.microgroup, echo={"truncated_prompts": cut})
        scores = Scores(by_reward={"jpeg_size": (1.0, 1.0)})
        scored.append(ScoredMicrogroup(task=item.task, microgroup=microgroup, scores=scores))
    groups = assemble(scored, group_size=4)
    assert reward_metrics(recipe, groups, make_batch(recipe, groups))["rollout/truncated_prompts"] == 3
    assert heldout_metrics(recipe, scored)["eval/truncated_prompts"] == 6
    assert "eval/truncated_prompts" not in heldout_metrics(recipe_with(tmp_path), scored)


def test_watched_reward_that_is_nan_leaves_the_total_alone(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, 'rewards=[{type="jpeg_size", weight=2.0}, {type="brightness", weight=0.0}]')
    scored = [
        ScoredMicrogroup(
            task=item.task,
            microgroup=item.microgroup,
            scores=Scores(by_reward={"jpeg_size": (1.0, 2.0), "brightness": (math.nan, 0.5)}),
        )
        for item in scored_of(task_of(0, 0), task_of(0, 2))
    ]
    assert heldout_rewards(recipe, scored)["total"] == [2.0, 4.0, 2.0, 4.0]
    flat = [
        ScoredMicrogroup(
            task=item.task,
            microgroup=item.microgroup,
            scores=Scores(by_reward={"jpeg_size": (1.0, 1.0), "brightness": (math.nan, 0.5)}),
        )
        for item in scored
    ]
    groups = assemble(flat, group_size=4)
    metrics = reward_metrics(recipe, groups, make_batch(recipe, groups))
    assert metrics["reward/train_mean"] == 2.0
    assert metrics["reward/train_std"] == 0.0
    assert metrics["reward/brightness/mean"] == 0.5
    assert metrics["reward/num_masked"] == 0.0


def test_the_first_failure_keeps_the_cause_that_it_has() -> None:
    told, bare = EngineError("the engine is gone"), EngineError("another")
    told.__cause__ = ConnectionResetError("by peer")
    groups = [ExceptionGroup("tasks", [told, bare]), ExceptionGroup("tasks", [ExceptionGroup("inner", [bare])])]
    with pytest.raises(EngineError, match="the engine is gone") as caught:
        raise_first(groups[0])
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    with pytest.raises(EngineError, match="another") as caught:
        raise_first(groups[1])
    assert caught.value.__cause__ is groups[1]
