"""A whole RL run in this process: the real driver, engine worker, wire, trainer and checkpoints, with delays of a test's
choice in the place of Ray and HTTP."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from run_fixtures import final_tensors, learned, metric_rows, tiny_model
from trainer_fixtures import one_rank

from verst.config.recipe import RlRecipe
from verst.engine.resolve import resolve
from verst.engine.wire import Answer, GenerateRequest, encode_response, to_microgroup
from verst.engine.worker import Worker
from verst.loops.report import Report
from verst.loops.rl import Run, resume_point
from verst.loops.run_folder import RunFolder
from verst.loops.stop import StopSignal
from verst.rewards.local import LocalRewards
from verst.rollout.engines import EnginePool
from verst.rollout.filters import GroupFilters
from verst.rollout.plan import MicrogroupTask
from verst.rollout.prompts import PromptSource, read_prompts
from verst.rollout.scoring import reward_batch
from verst.trainer.rl import RlTrainer, UpdateMetrics
from verst.types import Microgroup, SampleKey, Scores
from verst.weights.manifest import verify

DECOUPLED = 'algorithm={type="flow_grpo", old_log_probs="recompute", importance_cap=2.0, clip_low=0.01, clip_high=0.01}'
"""What stale samples are trained with."""
Hook = Callable[[str, int], bool | None]
"""(what is about to happen, how often it has happened before); raises to end the run there, True asks it to stop."""


class Killed(Exception):
    """Ends a run as a kill would, as far as what is on the disk goes."""


@functools.cache
def worker() -> Worker:
    """The engine's model, once: each run sends all of its weights."""
    return Worker(tiny_model())


class Engine:
    """In the place of an EngineClient."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.url = "here"

    async def generate(self, request: GenerateRequest, *, weight_version: int | None = None) -> Answer:
        world = self._world
        await world.delay()
        world.happens("generate" if request.rollout else "evaluate")
        (records,) = worker().generate([resolve(request, worker().components)])
        assert not isinstance(records, Exception), records
        if not request.rollout:
            world.evaluated.append(worker().weight_version)
        await world.delay()
        return Answer(body=encode_response(records))

    async def update_weights(self, manifest: Any) -> None:
        verify(manifest, worker().update_from_manifest(manifest), engine=self.url)

    async def check_prompts(self, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        return []

    async def check_requests(self, requests: Sequence[GenerateRequest]) -> list[str | None]:
        return [None for _ in requests]

    async def close(self) -> None:
        pass


class Trainer:
    """In the place of a TrainerGroup."""

    def __init__(self, world: World, trainer: RlTrainer) -> None:
        self._world = world
        self.rank = trainer

    async def update(self, shares: Any) -> UpdateMetrics:
        await self._world.delay()
        self._world.happens("update")
        metrics = self.rank.update(shares[0])
        await self._world.delay()
        return metrics

    async def save(self, root: Path, iteration: int) -> None:
        self._world.happens("save")
        self.rank.save(root, iteration)

    async def saved(self) -> bool:
        return self.rank.saved()

    async def finish_save(self) -> None:
        self.rank.finish_save()

    async def load(self, folder: Path) -> None:
        self.rank.load(folder)

    async def scale_lr(self, scale: float) -> None:
        self.rank.core.lr_scale = scale


class World:
    """In the place of a Cluster."""

    sync_choice = "in this process"
    transports = ("msgpack: in this process",)

    def __init__(
        self, recipe: RlRecipe, trainer: RlTrainer, *, seed: int, hook: Hook, score: Callable[[SampleKey], float] | None
    ) -> None:
        """seed: of the delays."""
        self.trainer = Trainer(self, trainer)
        self.engines = EnginePool([Engine(self)], per_engine=64)  # type: ignore[list-item]
        self.stop = StopSignal()
        self.evaluated: list[int] = []
        """Weight version of each answer to an evaluation."""
        self.prompts: dict[tuple[int, int], str] = {}
        """(rollout, group) -> its prompt."""
        self._rng = random.Random(seed)
        self._hook = hook
        self._rewards, self._score = LocalRewards(recipe.rewards), score
        self.counted: dict[str, int] = {}

    async def delay(self) -> None:
        for _ in range(self._rng.choice((0, 1, 3, 10, 40))):
            await asyncio.sleep(0)

    def happens(self, what: str) -> None:
        times = self.counted.get(what, 0)
        self.counted[what] = times + 1
        if self._hook(what, times):
            self.stop._on_signal()

    async def update(self, shares: Any) -> UpdateMetrics:
        return await self.trainer.update(shares)

    async def sync(self, version: int, *, ema: bool = False) -> Mapping[str, Any]:
        rank = self.trainer.rank
        manifest = rank.publish(version, ema=ema)
        assert manifest is not None
        await self.engines.sync(manifest)
        rank.unpublish()
        return manifest

    async def parse(self, answer: Answer, keys: Sequence[SampleKey]) -> Microgroup:
        await self.delay()
        return to_microgroup(answer, keys)

    async def score(self, task: MicrogroupTask, microgroup: Microgroup) -> Scores:
        await self.delay()
        self.happens("score")
        if task.request.rollout:
            self.prompts[task.rollout, task.group] = task.prompts[0]
        if self._score is not None and task.request.rollout:
            return Scores(by_reward={"jpeg_size": tuple(self._score(key) for key in task.keys)})
        return await self._rewards.score(reward_batch(task, microgroup))

    score_all = score_gold = score

    def reward_metrics(self) -> dict[str, float]:
        return {}

    supervision_metrics = reward_metrics


def run_here(
    recipe: RlRecipe,
    *,
    seed: int = 0,
    hook: Hook = lambda what, times: None,
    score: Callable[[SampleKey], float] | None = None,
    until: int | None = None,
) -> World:
    """The run, from where its folder stands to its end. score: of training samples in place of the recipe's reward."""
    folder = RunFolder(recipe)
    report = Report(recipe, folder, quiet=True)

    async def drive(trainer: RlTrainer) -> World:
        world = World(recipe, trainer, seed=seed, hook=hook, score=score)
        source = PromptSource(recipe.prompts.train, seed=recipe.run.seed, shuffle=recipe.prompts.shuffle)
        heldout = read_prompts(recipe.prompts.heldout)[: recipe.eval.num_prompts]
        run = Run(recipe, folder, report, world, source, heldout, GroupFilters(recipe))  # type: ignore[arg-type]
        try:
            await run.to_the_end(world.stop, resume_point(folder), until)
        finally:
            await run.close()
        return world

    try:
        with one_rank(recipe) as trainer:
            return asyncio.run(drive(trainer))
    finally:
        report.close()
        folder.close()


def outcome(recipe: RlRecipe) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """What a run has made: tensors of its newest checkpoint, and metrics without the clock's."""
    path = recipe.run.folder / recipe.run.name
    return final_tensors(path), [learned(row) for row in metric_rows(path)]


def assert_same(one: RlRecipe, two: RlRecipe) -> None:
    """Every bit of the end, and every number on the way."""
    (expected, rows), (got, other) = outcome(one), outcome(two)
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert other == rows
