"""A rollout as a run makes it, against fake engines: sampler, pipeline, HTTP clients, Ray parsers, reward pools, spans.

Only the engines (`fake_engines`) and what rewards compute are made up. What a reward is asked about says which sample it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from verst.cluster.actors import ParserActor
from verst.cluster.calls import ActorPool
from verst.cluster.session import allow_open_files as allow_open_files
from verst.cluster.session import connect
from verst.cluster.tensors import as_handles
from verst.config import load_recipe
from verst.config.recipe import RlRecipe, reward_name
from verst.engine.blocks import BlockPool
from verst.engine.client import EngineClient
from verst.engine.wire import Answer, to_microgroup
from verst.obs.spans import PARSER, Spans, lane_of
from verst.rewards.calls import Call
from verst.rewards.pool import RewardPool
from verst.rollout.engines import EnginePool
from verst.rollout.filters import GroupFilters
from verst.rollout.pipeline import Pipeline
from verst.rollout.plan import MicrogroupTask
from verst.rollout.prompts import PromptSource
from verst.rollout.sampler import Rollout, Sampler, Standing
from verst.rollout.scoring import Scorer
from verst.types import Microgroup, SampleKey, Scores
from verst.weights.block import host_identity

ROOT = Path(__file__).parents[1]


def recipe_of(*overrides: str) -> RlRecipe:
    """The glyph recipe, whose model is never loaded here."""
    recipe = load_recipe(ROOT / "recipes/glyphs_grpo.toml", ("cluster.num_cpus=4", *overrides))
    assert isinstance(recipe, RlRecipe)
    return recipe


def sample_name(key: SampleKey) -> str:
    """What stands for a sample's prompt when it is scored."""
    return f"{key.rollout}.{key.group}.{key.index}"


class Parsers:
    """Ray parsers, as `Cluster` has them. One Ray for all rollouts of a benchmark."""

    def __init__(self, recipe: RlRecipe) -> None:
        connect(recipe)
        as_handles()
        actor = ray.remote(ParserActor).options(num_cpus=0)
        actors: list[Any] = [actor.remote(driver_host=host_identity()) for _ in range(recipe.rollout.parsers.num)]
        self.pids = ray.get([a.pid.remote() for a in actors])
        self._pool = ActorPool(actors, role="parser", dispatch=recipe.rollout.parsers.dispatch)
        self.busy_s = 0.0

    async def locate(self) -> None:
        await self._pool.locate()

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._pool.hosts

    async def parse(self, spans: Spans, answer: Answer, keys: Sequence[SampleKey]) -> Microgroup:
        parser = -1

        def submit(actor: Any) -> Any:
            nonlocal parser
            parser = self._pool.actors.index(actor)
            return actor.parse.remote(answer, keys)

        microgroup: Microgroup
        microgroup, seconds = await self._pool.call(submit)
        ended_s = time.monotonic()
        spans.add("parse", start_s=ended_s - seconds, end_s=ended_s, lane=lane_of(PARSER, parser))
        self.busy_s += seconds
        return microgroup

    def close(self) -> None:
        ray.shutdown()


class LocalParsers:
    """Decoding on the driver's loop."""

    hosts: tuple[str, ...] = ()

    async def locate(self) -> None:
        pass

    async def parse(self, spans: Spans, answer: Answer, keys: Sequence[SampleKey]) -> Microgroup:
        with spans.span("parse", lane=lane_of(PARSER, 0)):
            return to_microgroup(answer, keys)


def run_rollout(
    recipe: RlRecipe, urls: Sequence[str], parsers: Parsers | LocalParsers, calls: Mapping[str, Call], spans: Spans
) -> tuple[Rollout, float]:
    """Rollout 0 and its seconds. calls: name of a reward -> what its workers do."""
    results: list[tuple[Rollout, float]] = []

    async def main() -> None:
        # Not returned: asyncio.run prints the result of its task, all tensors of it, into an error that it drops.
        results.append(await _one_rollout(recipe, urls, parsers, calls, spans))

    asyncio.run(main())
    return results[0]


async def _one_rollout(
    recipe: RlRecipe, urls: Sequence[str], parsers: Parsers | LocalParsers, calls: Mapping[str, Call], spans: Spans
) -> tuple[Rollout, float]:
    await parsers.locate()
    received = BlockPool(recipe.rollout.shared_bytes)
    clients = [
        EngineClient(url, transport=recipe.rollout.transport, hosts=parsers.hosts, pool=received) for url in urls
    ]
    engines = EnginePool(clients, per_engine=recipe.engine.queue_size, spans=spans)
    await engines.negotiate()
    pools = [
        RewardPool(c, calls[reward_name(c)], deterministic=recipe.run.deterministic, on_span=spans.add)
        for c in recipe.rewards
    ]
    scorer = Scorer(recipe.rewards, pools, group_size=recipe.rollout.group_size)

    async def parse(answer: Answer, keys: Sequence[SampleKey]) -> Microgroup:
        return await parsers.parse(spans, answer, keys)

    async def score(task: MicrogroupTask, microgroup: Microgroup) -> Scores:
        return await scorer(dataclasses.replace(task, prompts=tuple(map(sample_name, task.keys))), microgroup)

    pipeline = Pipeline(generate=engines.generate, parse=parse, check=engines.check, score=score, spans=spans)
    source = PromptSource(recipe.prompts.train, seed=recipe.run.seed, shuffle=recipe.prompts.shuffle)
    sampler = Sampler(recipe, source, pipeline, GroupFilters(recipe), spans=spans)
    started = time.perf_counter()
    rollout, _ = await sampler.rollout(0, Standing(), weight_version=0)
    seconds = time.perf_counter() - started
    await asyncio.gather(*(client.close() for client in clients))
    received.close()
    return rollout, seconds
