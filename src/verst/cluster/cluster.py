"""All processes of an RL run: placed by Ray, started side by side, ended together."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NoReturn, TypeVar

import ray
import torch

from verst.algorithms.pairs import PairBlock
from verst.cluster.actors import ParserActor, RewardActor
from verst.cluster.calls import ActorPool, all_of, result_of
from verst.cluster.comeback import not_there
from verst.cluster.engines import EngineFleet
from verst.cluster.hand_over import HandOver
from verst.cluster.nodes import SharedFolders, check_addresses, check_seen, with_absolute_paths
from verst.cluster.placement import Placement
from verst.cluster.processes import Processes
from verst.cluster.restarts import Restarts, loan_of, spawn_trainers, watch_trainers
from verst.cluster.router import RunRouter
from verst.cluster.session import connect
from verst.cluster.supervisor import Fault, OnEvent, Supervisor
from verst.cluster.tensors import as_handles
from verst.cluster.trainers import TrainerGroup
from verst.cluster.workers import Workers
from verst.config.placement import ColocatedPlacement
from verst.config.recipe import RlRecipe
from verst.config.rewards import reward_name
from verst.config.sections import AutoSync, ChosenSync, RewardConfig
from verst.config.sync import chosen
from verst.engine.blocks import BlockPool, supported
from verst.engine.client import EngineClient
from verst.engine.wire import Answer
from verst.errors import EngineError, ProcessDied, StateLost, SyncError
from verst.obs.spans import DRIVER, PARSER, Spans, lane_of
from verst.rewards.base import RewardBatch, Score
from verst.rewards.calls import Call
from verst.rewards.pool import RewardPool
from verst.rollout.engines import EnginePool
from verst.rollout.pipeline import together
from verst.rollout.plan import MicrogroupTask
from verst.rollout.routed import Route
from verst.rollout.scoring import Scorer
from verst.trainer.rl import UpdateMetrics
from verst.trainer.topology import choose, here
from verst.types import Microgroup, SampleKey, Scores
from verst.web.guard import new_token, token_from_environment
from verst.weights.block import host_identity

T = TypeVar("T")


class Cluster:
    """Use as an async context manager; inside it every process is up."""

    def __init__(
        self,
        recipe: RlRecipe,
        *,
        cuda: bool,
        spans: Spans | None = None,
        on_event: OnEvent = lambda name, event: None,
        on_processes: Callable[[Mapping[str, list[int]]], None] = lambda pids: None,
    ) -> None:
        """on_event: hears of faults and restarts; on_processes: is told role -> process ids, whenever they change."""
        if recipe.cluster.address is not None:
            recipe = with_absolute_paths(recipe)
        self._recipe = recipe
        self._spans = spans or Spans()
        self._device = "cuda" if cuda else "cpu"
        self._placement = Placement(recipe, cuda=cuda)
        self._colocated = isinstance(recipe.cluster.placement, ColocatedPlacement)
        self._processes = Processes(recipe, self._placement, cuda=cuda)
        self._on_processes = on_processes
        self._supervisor = Supervisor(recipe.supervision, on_event=on_event)
        # Made for this run where the environment has none: nobody else asks its engines anything.
        self._token = token_from_environment() or new_token()
        self._fleet = EngineFleet(recipe, self._processes, self._supervisor, device=self._device, token=self._token)
        self._router = RunRouter(recipe, self._processes, self._supervisor, client=self._client, token=self._token)
        self._watching: list[asyncio.Task[None]] = []
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
        except StateLost as lost:
            try:
                await self._diagnose(lost)
            finally:
                await self.__aexit__(None, None, None)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _diagnose(self, lost: StateLost) -> NoReturn:
        """Of a trainer that was lost before the run could have saved anything. Raises ProcessDied."""
        name, reason = next(iter(self.trainer.lost.items()), (self.trainer.names[0], str(lost)))
        log = await self._processes.last_lines(name)
        self._supervisor.fault(Fault(kind="trainer", process=name, reason=reason, log=log), last=True)
        raise lost

    async def __aexit__(self, *error: object) -> None:
        for watching in self._watching:
            watching.cancel()
        if hasattr(self, "engines"):
            await self.engines.close()
        self._received.close()
        await self._fleet.close()
        self._processes.end_all()
        self._placement.release()
        # An attached cluster goes on without us; a local one ends with all of its processes.
        ray.shutdown()

    async def _start(self) -> None:
        recipe = self._recipe
        await self._placement.reserve()
        self._fleet.make()
        self.trainer = TrainerGroup(spawn_trainers(recipe, self._processes, device=self._device))
        self._make_workers()
        watch_trainers(recipe, self.trainer, self._processes, self._supervisor)
        self._watching.append(asyncio.create_task(self._supervisor.run(), name="verst-supervisor"))
        await together(self._fleet.arrive(), self._ranks_arrive(), self._parser_workers.start())
        sync = await self._choose_sync()
        if recipe.cluster.address is not None:
            await self._check_folders()
        rewards = [workers.start() for workers in self._reward_workers.values()]
        urls: list[str]
        route: Route | None
        urls, route, *_ = await together(self._load_models(sync), self._router.start(), *rewards)
        await self.trainer.locate()
        self._make_scorers()
        self._hand_over = HandOver(
            self.trainer, num_engines=recipe.engine.num, per_engine=recipe.engine.parallel.ranks, phase=self._phase
        )
        self._restarts = Restarts(
            recipe,
            self._processes,
            self._supervisor,
            self._fleet,
            self.trainer,
            self._hand_over,
            device=self._device,
            client=self._client,
            choose_sync=self._choose_sync,
        )
        self.engines = EnginePool(
            [self._client(url) for url in urls],
            per_engine=recipe.engine.queue_size,
            mender=self._restarts if recipe.supervision.enabled else None,
            route=route,
            spans=self._spans,
        )
        self._fleet.has_work = self.engines.has_work
        self.transports = await self.engines.negotiate()
        self._processes.on_change = self._on_processes
        self._on_processes(self._processes.pids())
        if route is not None:
            self._watching.append(asyncio.create_task(route.watch(self.engines.put_aside), name="verst-route"))

    async def _ranks_arrive(self) -> None:
        """Raises StateLost where a rank ends, or is not there in time."""
        start_s, trainer = self._recipe.supervision.start_s, self.trainer
        for name in trainer.names:
            try:
                async with asyncio.timeout(start_s):
                    await self._processes.know(name)
            except (ProcessDied, TimeoutError) as error:
                if isinstance(error, TimeoutError):
                    self._supervisor.hangs(name, not_there(start_s))
                trainer.lost[name] = str(error)
                raise StateLost(trainer.lost[name]) from error

    def _make_workers(self) -> None:
        recipe, spawn = self._recipe, self._processes.spawn
        make = functools.partial(Workers, processes=self._processes, supervisor=self._supervisor)
        make = functools.partial(make, start_s=recipe.supervision.start_s)
        self._parser_workers = make(
            [f"parser {i}" for i in range(recipe.rollout.parsers.num)],
            lambda name: spawn(name, ParserActor, "parser", driver_host=host_identity()),
            role="parser",
            kind="parser",
            load=_nothing_to_load,
            limit_s=recipe.supervision.parser_s,
            limit_key="supervision.parser_s",
            dispatch=recipe.rollout.parsers.dispatch,
        )
        self._parsers = self._parser_workers.pool
        self._reward_workers: dict[str, Workers] = {}
        for kind, rewards in (("reward", recipe.rewards), ("gold", recipe.watch.gold)):
            for reward in rewards:
                name = reward_name(reward)
                self._reward_workers[name] = make(
                    [f"reward {name} {i}" for i in range(reward.workers)],
                    functools.partial(_spawn_reward, spawn, role=f"{kind}:{name}", config=reward),
                    role=f"reward {name}",
                    kind="reward",
                    load=lambda actor, name=name: result_of(actor.load.remote(), role=f"reward {name}"),
                    # A call that is too long is given up and made again: only one that never ends is a hang.
                    limit_s=reward.timeout_s * max(1, reward.attempts - 1),
                    limit_key="rewards.timeout_s, rewards.attempts",
                )

    def _client(self, url: str) -> EngineClient:
        recipe = self._recipe
        return EngineClient(
            url,
            timeout_s=recipe.engine.request_timeout_s,
            # An engine that refuses connections is gone; where nobody brings it back it may be worth to wait.
            refused_s=1.0 if recipe.supervision.enabled else 10.0,
            transport=recipe.rollout.transport,
            compression=recipe.rollout.compression,
            hosts=self._parsers.hosts,
            pool=self._received,
            token=self._token,
        )

    async def restart_trainer(self, why: StateLost) -> None:
        """See `Restarts.restart_trainer`."""
        await self._restarts.restart_trainer(self.engines, why)

    async def _check_folders(self) -> None:
        """Raises ConfigError, before a model is loaded, for a node that does not see what all of them need."""
        folders = SharedFolders(self._recipe)
        roles = [f"trainer rank {i}" for i in range(len(self.trainer.ranks))]
        roles += self._fleet.all_names
        actors = (*self.trainer.ranks, *self._fleet.actors)
        try:
            found = await all_of([actor.unseen.remote(folders.wanted) for actor in actors], roles=roles)
        finally:
            folders.remove()
        check_seen([(role, *seen) for role, seen in zip(roles, found, strict=True)], folders.wanted)

    async def _load_models(self, sync: ChosenSync) -> list[str]:
        """The engines' URLs, once trainer and engines have their weights."""
        recipe = self._recipe

        async def engines() -> list[str]:
            loans = [functools.partial(loan_of, recipe, self.trainer, index) for index in range(recipe.engine.num)]
            urls: list[str] = await together(*(self._fleet.start(index, loan) for index, loan in enumerate(loans)))
            return urls

        placement = recipe.cluster.placement
        if isinstance(placement, ColocatedPlacement) and placement.share_base:
            await self.trainer.build(sync)
            return await engines()
        urls: list[str]
        urls, _ = await together(engines(), self.trainer.build(sync))
        return urls

    async def _choose_sync(self) -> ChosenSync:
        config, ranks, engine_places = self._recipe.sync, self.trainer.ranks, self._fleet.places
        places = await all_of([actor.place.remote() for actor in ranks], roles=self.trainer.names)
        self._placement.verify(places, engine_places)
        check_addresses(self._recipe.engine.host, here(torch.device("cpu")), engine_places)
        if not isinstance(config, AutoSync):
            self.sync_choice = f"weight sync by {config.type} (sync.type)"
            return config
        name, why = choose(places, engine_places, colocated=self._colocated)
        self.sync_choice = f"weight sync by {name}: {why}"
        return chosen(config, name)

    async def update(self, shares: Sequence[list[list[PairBlock]]]) -> UpdateMetrics:
        """One share a rank: for each optimizer step its pair blocks. Engines may sleep meanwhile, and until a sync."""
        sleep = self._recipe.cluster.sleep
        if sleep.engine != "off":
            keep: Literal["all", "others"] = "all" if sleep.engine == "host" else "others"
            with self._spans.span("sleep", lane=lane_of(DRIVER, 0)):
                await self._with_engines(lambda: self.engines.sleep(keep=keep))
        return await self.trainer.update(shares)

    async def sync(self, version: int, *, ema: bool = False) -> Mapping[str, Any]:
        """The trainer's weights into every engine, each with a certificate; the manifest. Raises SyncError.

        Where an engine is lost on the way, all of them get all of it again.
        """

        async def hand_over() -> Mapping[str, Any]:
            if self._recipe.cluster.sleep.engine != "off":
                with self._phase("wake", version):
                    await self.engines.wake()
            return await self._hand_over.to_all(self.engines, version, ema=ema)

        return await self._with_engines(hand_over)

    async def _with_engines(self, work: Callable[[], Awaitable[T]]) -> T:
        """Work that all engines share, from its beginning again where one of them was lost meanwhile."""
        while True:
            await self.engines.settled()
            lost = self.engines.num_lost
            try:
                return await work()
            except (EngineError, SyncError) as error:
                # What an engine says may be the trainer's end.
                await self.trainer.check()
                if not await self.engines.mend(error) and self.engines.num_lost == lost:
                    raise

    def _phase(self, name: str, version: int) -> AbstractContextManager[None]:
        return self._spans.span(name, lane=lane_of(DRIVER, 0), iteration=version)

    def _make_scorers(self) -> None:
        recipe, gold, configs = self._recipe, self._recipe.watch.gold, self._recipe.judges
        self._pools = [
            RewardPool(
                config,
                _remote(self._reward_workers[reward_name(config)].pool, timeout_s=config.timeout_s),
                deterministic=recipe.run.deterministic,
                limited=False,
                on_span=self._spans.add,
            )
            for config in configs
        ]
        make = functools.partial(
            Scorer, pools=self._pools, group_size=recipe.rollout.group_size, always=[reward_name(c) for c in gold]
        )
        self._trained, self._gold, self._every = make(recipe.rewards), make(gold), make(configs)

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

    def supervision_metrics(self) -> dict[str, float]:
        """Processes that came back, since this driver started."""
        return self._supervisor.metrics()

    def reward_metrics(self) -> dict[str, float]:
        """Of every pool of reward workers, since the last call of this."""
        return {name: value for pool in self._pools for name, value in pool.metrics().items()}


async def _nothing_to_load(actor: Any) -> None:
    pass


def _spawn_reward(spawn: Callable[..., Any], name: str, *, role: str, config: RewardConfig) -> Any:
    return spawn(name, RewardActor, role, config)


def _remote(pool: ActorPool, *, timeout_s: float) -> Call:
    async def call(batch: RewardBatch) -> Sequence[Score]:
        scores: Sequence[Score] = await pool.call(lambda actor: actor.score.remote(batch), timeout_s=timeout_s)
        return scores

    return call
