"""The processes of a run, as Ray actors: thin shells around plain classes."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import ray
import torch

from verst.algorithms.pairs import PairBlock
from verst.cluster.nodes import advertised, unseen
from verst.cluster.tensors import as_handles
from verst.config.recipe import RlRecipe
from verst.config.sections import ChosenSync, RewardConfig, SglangEngine
from verst.engine.ranked import Follower
from verst.engine.ranks import EngineRanks, Meeting
from verst.engine.server import EngineServer
from verst.engine.sglang.server import SglangEngineServer
from verst.engine.wire import Answer, to_microgroup
from verst.rewards import Reward, RewardBatch, make_reward
from verst.rewards.base import Score
from verst.router.options import RouterOptions
from verst.router.pool import Policy
from verst.router.server import serve_beside
from verst.trainer.parallel import open_store
from verst.trainer.rl import DTYPES, RlTrainer, UpdateMetrics
from verst.trainer.topology import Place, here
from verst.types import Microgroup, SampleKey
from verst.weights.block import host_identity


@dataclass(frozen=True, kw_only=True)
class Facts:
    """By which a process is known from outside."""

    pid: int
    started: float
    """Unix seconds, as the system has it: a number may come again, with another start."""
    host: str
    """`host_identity`."""
    node: str
    """Ray's id of it."""
    log: str | None
    """File on that node that the process's errors go to."""


class Process:
    """What every actor answers."""

    calls_at_a_time: ClassVar[int] = 1
    is_asked_while_it_works: ClassVar[bool] = False
    """`progress` has a thread of its own."""

    def facts(self) -> Facts:
        errors = Path("/proc/self/fd/2")
        log = os.readlink(errors) if errors.is_symlink() else None
        return Facts(
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            host=host_identity(),
            node=ray.get_runtime_context().get_node_id(),
            log=log,
        )

    def host(self) -> str:
        return host_identity()

    def unseen(self, wanted: Mapping[str, Path]) -> tuple[str, list[str]]:
        """This node's address, and the keys whose files are not there."""
        return ray.util.get_node_ip_address(), unseen(wanted)


class EngineActor(Process):
    """A native engine and its HTTP server, or an SGLang server's adapter."""

    def __init__(self, recipe: RlRecipe, *, index: int, device: str, token: str | None) -> None:
        self._recipe, self._index, self._token = recipe, index, token
        self._device = torch.device(device)
        self._store: Any = None

    def place(self) -> Place:
        """Where weights are to arrive: an SGLang server's come by way of its adapter's memory."""
        adapts = isinstance(self._recipe.engine, SglangEngine)
        return here(torch.device("cpu") if adapts else self._device)

    def open(self) -> tuple[str, int]:
        """Of an engine of several ranks: host and port of the store where they meet."""
        host = _own_address(self._recipe)
        self._store = open_store(host, 0, rank=0, world_size=self._recipe.engine.parallel.ranks)
        return host, int(self._store.port)

    def start(self, timeout_s: float, loan: Any) -> str:
        """The URL, once the model is loaded. loan: of the trainer rank beside it."""
        node = _own_address(self._recipe)
        self._server = self._make_server(self._recipe.engine.host or node, loan)
        self._server.start()
        self._server.wait_ready(timeout_s)
        return advertised(self._server.url, node)

    def _make_server(self, host: str, loan: Any) -> EngineServer:
        recipe, engine = self._recipe, self._recipe.engine
        options: dict[str, Any] = {
            "dtype": DTYPES[recipe.model.dtype],
            "host": host,
            "port": engine.port + self._index if engine.port else 0,
            "queue_size": engine.queue_size,
            "threads": recipe.run.threads,
            "request_timeout_s": engine.request_timeout_s,
            "shared_bytes": 0 if recipe.rollout.transport == "msgpack" else recipe.rollout.shared_bytes,
            "token": self._token,
            "files": None,
        }
        if isinstance(engine, SglangEngine):
            return SglangEngineServer(
                recipe.model.path,
                url=engine.urls[self._index] if engine.urls else None,
                executable=engine.executable,
                arguments=engine.arguments,
                environment=engine.environment,
                server_device="cuda" if self._device.type == "cuda" else "cpu",
                start_s=engine.start_s,
                way=engine.full_weights,
                check_noise=engine.check_noise,
                log=recipe.run.folder / recipe.run.name / "logs" / f"sglang-{self._index}.log",
                **options,
            )
        return EngineServer(
            recipe.model.path,
            fp32_modules=recipe.model.fp32_modules,
            compiled=recipe.model.compile,
            device=self._device,
            deterministic=recipe.run.deterministic,
            max_batch=engine.max_batch,
            loan=loan,
            meeting=None if self._store is None else _meeting(recipe, self._store, rank=0),
            **options,
        )

    def progress(self) -> int:
        """Grows with every denoising step and everything else that is done."""
        return self._server.progress


class EngineRankActor(Process):
    """Another rank of an engine."""

    calls_at_a_time = 2  # it says who it is while it follows

    def __init__(self, recipe: RlRecipe, *, rank: int, device: str) -> None:
        self._recipe, self._rank = recipe, rank
        self._device = torch.device(device)
        self._follower: Follower | None = None

    def place(self) -> Place:
        return here(self._device)

    def start(self, host: str, port: int) -> None:
        """Returns when all ranks are there and the model is loaded."""
        recipe = self._recipe
        store = open_store(host, port, rank=self._rank, world_size=recipe.engine.parallel.ranks)
        ranks = EngineRanks(_meeting(recipe, store, rank=self._rank), device=self._device)
        self._follower = Follower(
            recipe.model.path,
            ranks=ranks,
            dtype=DTYPES[recipe.model.dtype],
            device=self._device,
            fp32_modules=recipe.model.fp32_modules,
            deterministic=recipe.run.deterministic,
        )

    def follow(self) -> None:
        """Returns when the engine stops. Raises what broke off."""
        assert self._follower is not None, "start() comes first"
        # A setting of this thread, which is not the one that loaded.
        if self._recipe.run.threads:
            torch.set_num_threads(self._recipe.run.threads)
        self._follower.follow()


class RouterActor(Process):
    """The router before all engines."""

    def start(self, recipe: RlRecipe, token: str | None) -> str:
        """The URL; it knows no engine yet."""
        config, node = recipe.engine.router, _own_address(recipe)
        options = RouterOptions(
            policy=Policy(per_engine=config.per_engine),
            # More than the driver ever asks for at a time.
            queue_size=recipe.engine.num * recipe.engine.queue_size,
            request_timeout_s=recipe.engine.request_timeout_s,
            probe_s=config.probe_s,
        )
        return advertised(serve_beside(options, host=config.host or node, port=config.port, token=token), node)


def _meeting(recipe: RlRecipe, store: Any, *, rank: int) -> Meeting:
    parallel = recipe.engine.parallel
    return Meeting(store=store, rank=rank, ulysses=parallel.ulysses, ring=parallel.ring)


class ParserActor(Process):
    """Decodes engine responses off the driver's event loop."""

    def __init__(self, *, driver_host: str) -> None:
        # Here and not in a call, which a parser that came back would not have had.
        as_handles(always=host_identity() == driver_host)

    def parse(self, answer: Answer, keys: Sequence[SampleKey]) -> tuple[Microgroup, float]:
        """And the seconds that it took."""
        started = time.perf_counter()
        return to_microgroup(answer, keys), time.perf_counter() - started


class RewardActor(Process):
    """One worker of one reward."""

    def __init__(self, config: RewardConfig) -> None:
        torch.set_num_threads(1)
        self._config = config

    @functools.cached_property
    def _reward(self) -> Reward:
        # Not made in __init__: what goes wrong there comes out of Ray as a dead process, without the reason.
        return make_reward(self._config)

    def load(self) -> None:
        """Raises ConfigError or RewardError."""
        _ = self._reward

    def score(self, batch: RewardBatch) -> Sequence[Score]:
        return self._reward.score(batch)


class TrainerActor(Process):
    """One trainer rank. Made in two steps: rank 0 opens the store that the others join."""

    is_asked_while_it_works = True

    def __init__(self, recipe: RlRecipe, *, rank: int, device: str) -> None:
        self._recipe = recipe
        self._rank = rank
        self._device = torch.device(device)
        self._store: Any = None
        self._trainer: RlTrainer | None = None

    def open(self) -> tuple[str, int]:
        """Rank 0: host and port of the store."""
        host = _own_address(self._recipe)
        self._store = open_store(host, 0, rank=0, world_size=self._recipe.trainer.ranks)
        return host, int(self._store.port)

    def place(self) -> Place:
        return here(self._device)

    def build(self, host: str, port: int, sync: ChosenSync) -> None:
        world_size = self._recipe.trainer.ranks
        if self._store is None:
            self._store = open_store(host, port, rank=self._rank, world_size=world_size)
        self._trainer = RlTrainer(
            self._recipe.model_copy(update={"sync": sync}),
            rank=self._rank,
            world_size=world_size,
            store=self._store,
            device=self._device,
        )

    @ray.method(concurrency_group="watch")
    def progress(self) -> int:
        """Grows with every tile and optimizer step."""
        return 0 if self._trainer is None else self._trainer.progress

    @property
    def trainer(self) -> RlTrainer:
        assert self._trainer is not None, "build() comes first"
        return self._trainer

    def update(self, steps: list[list[PairBlock]]) -> UpdateMetrics:
        metrics = self.trainer.update(steps)
        if self._recipe.cluster.sleep.trainer and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return metrics

    def publish(self, version: int, ema: bool, receivers: int) -> Any:
        return self.trainer.publish(version, ema=ema, receivers=receivers)

    def lend(self) -> Any:
        return self.trainer.lend()

    def send(self) -> str | None:
        return self.trainer.send()

    def unpublish(self) -> None:
        self.trainer.unpublish()

    def save(self, root: Path, iteration: int) -> None:
        self.trainer.save(root, iteration)

    def saved(self) -> bool:
        return self.trainer.saved()

    def finish_save(self) -> None:
        self.trainer.finish_save()

    def load(self, folder: Path) -> None:
        self.trainer.load(folder)

    def scale_lr(self, scale: float) -> None:
        self.trainer.core.lr_scale = scale

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None


def _own_address(recipe: RlRecipe) -> str:
    """Where processes of this node are reached: by those of the machine alone with a local Ray."""
    return "127.0.0.1" if recipe.cluster.address is None else ray.util.get_node_ip_address()
