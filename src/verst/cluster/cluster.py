"""All processes of an RL run: placed by Ray, started side by side, ended together."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray
import torch

from verst.algorithms.pairs import PairBlock
from verst.cluster.actors import EngineActor, EngineRankActor, ParserActor, Process, RewardActor, TrainerActor
from verst.cluster.calls import ActorPool, all_of
from verst.cluster.engines import EngineProcesses
from verst.cluster.nodes import SharedFolders, check_addresses, check_seen, with_absolute_paths
from verst.cluster.placement import Placement
from verst.cluster.session import connect
from verst.cluster.tensors import as_handles
from verst.cluster.trainers import TrainerGroup
from verst.config.placement import ColocatedPlacement
from verst.config.plan import process_plan
from verst.config.recipe import RlRecipe
from verst.config.rewards import reward_name
from verst.config.sections import AutoSync, ChosenSync
from verst.config.sync import chosen
from verst.engine.blocks import BlockPool, supported
from verst.engine.client import EngineClient
from verst.engine.wire import Answer
from verst.errors import SyncError
from verst.obs.spans import DRIVER, PARSER, Spans, lane_of
from verst.rewards.base import RewardBatch, Score
from verst.rewards.calls import Call
from verst.rewards.pool import RewardPool
from verst.rollout.engines import EnginePool
from verst.rollout.plan import MicrogroupTask
from verst.rollout.scoring import Scorer
from verst.trainer.rl import UpdateMetrics
from verst.trainer.topology import Place, choose, here
from verst.types import Microgroup, SampleKey, Scores
from verst.web.guard import new_token, token_from_environment
from verst.weights.block import host_identity

_RESTARTS = 3
"""Times that a parser or reward worker may come back in one run."""
_START_TIMEOUT_S = 600.0


class Cluster:
    """Use as an async context manager; inside it every process is up."""

    def __init__(self, recipe: RlRecipe, *, cuda: bool, spans: Spans | None = None) -> None:
        if recipe.cluster.address is not None:
            recipe = with_absolute_paths(recipe)
        self._recipe = recipe
        self._cuda = cuda
        self._spans = spans or Spans()
        self._device = "cuda" if cuda else "cpu"
        self._actors: list[Any] = []
        self._placement = Placement(recipe, cuda=cuda)
        self._colocated = isinstance(recipe.cluster.placement, ColocatedPlacement)
        self._engines: list[EngineProcesses] = []
        self._lost_ranks: list[str] = []
        """Why ranks of engines have ended."""
        self.sync_choice = ""
        """Which transport carries the weights, and why."""
        self.transports: list[str] = []
        """How the answers of each engine travel, and why."""
        self._received = BlockPool(recipe.rollout.shared_bytes if supported() else 0)

    async def __aenter__(self) -> Cluster:
        connect(self._recipe)
        as_handles()
        try:
            await self._start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        if hasattr(self, "engines"):
            await self.engines.close()
        self._received.close()
        for engine in self._engines:
            await engine.close()
        for actor in self._actors:
            ray.kill(actor)
        self._placement.release()
        # An attached cluster goes on without us; a local one ends with all of its processes.
        ray.shutdown()

    async def _start(self) -> None:
        recipe = self._recipe
        plan = {p.role: p for p in process_plan(recipe, cuda=self._cuda)}
        await self._placement.reserve()

        def spawn(cls: type[Process], role: str, *args: Any, restarts: int = 0, place: int = 0, **kwargs: Any) -> Any:
            options: dict[str, Any] = {"num_cpus": plan[role].cpus, "num_gpus": plan[role].gpus}
            options |= self._placement.options(role, place)
            options["max_concurrency"] = cls.calls_at_a_time
            if restarts:
                options |= {"max_restarts": restarts, "max_task_retries": restarts}
            actor: Any = ray.remote(cls).options(**options).remote(*args, **kwargs)
            self._actors.append(actor)
            return actor

        per_engine = recipe.engine.parallel.ranks
        # Made for this run where the environment has none: nobody else asks its engines anything.
        token = token_from_environment() or new_token()
        self._engines = [
            EngineProcesses(
                spawn(EngineActor, "engine", recipe, index=i, device=self._device, token=token, place=i * per_engine),
                [
                    spawn(EngineRankActor, "engine", recipe, rank=r, device=self._device, place=i * per_engine + r)
                    for r in range(1, per_engine)
                ],
                lost=self._end_engine,
            )
            for i in range(recipe.engine.num)
        ]
        ranks = [
            spawn(TrainerActor, "trainer", recipe, rank=i, device=self._device, place=i)
            for i in range(recipe.trainer.ranks)
        ]
        parsers = [
            spawn(ParserActor, "parser", restarts=_RESTARTS, driver_host=host_identity())
            for _ in range(recipe.rollout.parsers.num)
        ]
        self._parsers = ActorPool(parsers, role="parser", dispatch=recipe.rollout.parsers.dispatch)
        self._rewards = {
            reward_name(reward): ActorPool(
                [
                    spawn(RewardActor, f"{kind}:{reward_name(reward)}", reward, restarts=_RESTARTS)
                    for _ in range(reward.workers)
                ],
                role=f"reward {reward_name(reward)}",
            )
            for kind, rewards in (("reward", recipe.rewards), ("gold", recipe.watch.gold))
            for reward in rewards
        }
        self.trainer = TrainerGroup(ranks)
        sync = await self._choose_sync()
        if recipe.cluster.address is not None:
            await self._check_folders()
        urls, *_ = await asyncio.gather(
            self._load_models(sync),
            *(
                all_of([actor.load.remote() for actor in pool.actors], roles=[f"reward {name}"] * len(pool.actors))
                for name, pool in self._rewards.items()
            ),
        )
        await asyncio.gather(self.trainer.locate(), *(p.locate() for p in (self._parsers, *self._rewards.values())))
        clients = [
            EngineClient(
                url,
                timeout_s=recipe.engine.request_timeout_s,
                transport=recipe.rollout.transport,
                compression=recipe.rollout.compression,
                hosts=self._parsers.hosts,
                pool=self._received,
                token=token,
            )
            for url in urls
        ]
        self._make_scorers()
        self.engines = EnginePool(
            clients, per_engine=recipe.engine.queue_size, lost=self._lost_ranks, spans=self._spans
        )
        self.transports = await self.engines.negotiate()

    def _end_engine(self, lead: Any, reason: str) -> None:
        """A rank of an engine is lost, and with it the others: whoever waits for the engine is told why."""
        self._lost_ranks.append(reason)
        ray.kill(lead)

    @property
    def _engine_actors(self) -> list[Any]:
        """All ranks of all engines."""
        return [actor for engine in self._engines for actor in engine.actors]

    async def _check_folders(self) -> None:
        """Raises ConfigError, before a model is loaded, for a node that does not see what all of them need."""
        folders = SharedFolders(self._recipe)
        roles = [f"trainer rank {i}" for i in range(len(self.trainer.ranks))]
        roles += [f"engine process {i}" for i in range(len(self._engine_actors))]
        actors = (*self.trainer.ranks, *self._engine_actors)
        try:
            found = await all_of([actor.unseen.remote(folders.wanted) for actor in actors], roles=roles)
        finally:
            folders.remove()
        check_seen([(role, *seen) for role, seen in zip(roles, found, strict=True)], folders.wanted)

    async def _load_models(self, sync: ChosenSync) -> list[str]:
        """The engines' URLs, once trainer and engines have their weights."""

        async def engines(loans: Sequence[Any]) -> list[str]:
            starts = [e.start(_START_TIMEOUT_S, loan) for e, loan in zip(self._engines, loans, strict=True)]
            return await asyncio.gather(*starts)

        placement = self._recipe.cluster.placement
        if isinstance(placement, ColocatedPlacement) and placement.share_base:
            await self.trainer.build(sync)
            return await engines(await self.trainer.lend())
        urls, _ = await asyncio.gather(engines([None] * len(self._engines)), self.trainer.build(sync))
        return urls

    async def _choose_sync(self) -> ChosenSync:
        config, ranks, engines = self._recipe.sync, self.trainer.ranks, self._engine_actors
        places: list[Place] = await all_of(
            [actor.place.remote() for actor in (*ranks, *engines)],
            roles=["trainer"] * len(ranks) + ["engine"] * len(engines),
        )
        trainer_places, engine_places = places[: len(ranks)], places[len(ranks) :]
        self._placement.verify(trainer_places, engine_places)
        check_addresses(self._recipe.engine.host, here(torch.device("cpu")), engine_places)
        if not isinstance(config, AutoSync):
            self.sync_choice = f"weight sync by {config.type} (sync.type)"
            return config
        name, why = choose(trainer_places, engine_places, colocated=self._colocated)
        self.sync_choice = f"weight sync by {name}: {why}"
        return chosen(config, name)

    async def update(self, shares: Sequence[list[list[PairBlock]]]) -> UpdateMetrics:
        """One share a rank: for each optimizer step its pair blocks. Engines may sleep meanwhile, and until a sync."""
        sleep = self._recipe.cluster.sleep
        if sleep.engine != "off":
            await self.engines.sleep(keep="all" if sleep.engine == "host" else "others")
        return await self.trainer.update(shares)

    async def sync(self, version: int, *, ema: bool = False) -> Mapping[str, Any]:
        """The trainer's weights into every engine, each with a certificate; the manifest. Raises SyncError."""
        if self._recipe.cluster.sleep.engine != "off":
            await self.engines.wake()
        with self._phase("publish", version):
            manifests = await self.trainer.publish(version, ema=ema, receivers=len(self._engine_actors))
        if len({manifest["digest"] for manifest in manifests}) > 1:
            raise SyncError(f"trainer ranks hold different weights of version {version}")
        if manifests[0]["digest"]:
            try:
                with self._phase("update", version):
                    await self.engines.sync(*manifests)
            finally:
                await self.trainer.unpublish()
            return manifests[0]
        # Here the ranks work beside the engines: after a failure they may wait for the missing one yet, and nobody
        # should wait for them to say what it was.
        with self._phase("update", version):
            await self.engines.sync(*manifests, digest=self.trainer.send())
        await self.trainer.unpublish()
        return manifests[0]

    def _phase(self, name: str, version: int) -> AbstractContextManager[None]:
        return self._spans.span(name, lane=lane_of(DRIVER, 0), iteration=version)

    def _make_scorers(self) -> None:
        recipe, gold, configs = self._recipe, self._recipe.watch.gold, self._recipe.judges
        self._pools = [
            RewardPool(
                config,
                _remote(self._rewards[reward_name(config)]),
                deterministic=recipe.run.deterministic,
                on_span=self._spans.add,
            )
            for config in configs
        ]
        make = functools.partial(
            Scorer, pools=self._pools, group_size=recipe.rollout.group_size, always=[reward_name(c) for c in gold]
        )
        self._trained, self._gold, self._every = make(recipe.rewards), make(gold), make(configs)

    async def pids(self) -> dict[str, list[int]]:
        """role -> process ids, for people and for tests that kill them."""
        pools = {"engine": self._engine_actors, "trainer": self.trainer.ranks, "parser": self._parsers.actors}
        pools |= {f"reward:{name}": pool.actors for name, pool in self._rewards.items()}
        return {
            role: await all_of([a.pid.remote() for a in actors], roles=[role] * len(actors))
            for role, actors in pools.items()
        }

    async def parse(self, answer: Answer, keys: Sequence[SampleKey]) -> Microgroup:
        asked_s, parser = time.monotonic(), -1

        def submit(actor: Any) -> Any:
            nonlocal parser
            parser = self._parsers.actors.index(actor)
            return actor.parse.remote(answer, keys)

        microgroup, seconds = await self._parsers.call(submit)
        ended_s = time.monotonic()
        # Its clock is another one: what it did ended when its answer came.
        begun_s = max(asked_s, ended_s - seconds)
        self._spans.add("parse_wait", start_s=asked_s, end_s=begun_s)
        self._spans.add("parse", start_s=begun_s, end_s=ended_s, lane=lane_of(PARSER, parser))
        return microgroup

    async def score(self, task: MicrogroupTask, microgroup: Microgroup) -> Scores:
        """Every trained reward, side by side, each with its own attempts and policy."""
        return await self._trained(task, microgroup)

    async def score_gold(self, task: MicrogroupTask, microgroup: Microgroup) -> Scores:
        """The same by every gold reward."""
        return await self._gold(task, microgroup)

    async def score_all(self, task: MicrogroupTask, microgroup: Microgroup) -> Scores:
        """The same by trained and gold rewards."""
        return await self._every(task, microgroup)

    def reward_metrics(self) -> dict[str, float]:
        """Of every pool of reward workers, since the last call of this."""
        return {name: value for pool in self._pools for name, value in pool.metrics().items()}


def _remote(pool: ActorPool) -> Call:
    async def call(batch: RewardBatch) -> Sequence[Score]:
        scores: Sequence[Score] = await pool.call(lambda actor: actor.score.remote(batch))
        return scores

    return call
