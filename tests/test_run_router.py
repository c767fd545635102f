"""The router of a run: what goes through it, and what is lost when an engine or the router itself ends on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from async_fixtures import assert_same, run_here
from http_fixtures import serving
from loop_fixtures import on_a_loop
from router_fixtures import FakeEngine, scene, until
from run_fixtures import metric_rows, recipe_with, start_run, write_recipe
from test_pipeline import task_of

from verst.cluster.supervisor import Supervisor, Watched
from verst.config import load_recipe
from verst.config.plan import process_plan
from verst.config.supervision import SupervisionConfig
from verst.engine.client import EngineClient
from verst.errors import ConfigError, EngineError, InvariantError, ProcessDied, StateLost
from verst.loops.chaos import kinds_of
from verst.loops.ledger import read_ledger
from verst.rollout.engines import EnginePool
from verst.rollout.routed import Route

ROUTED = ("engine.router.enabled=true", "engine.num=2")
LOOK_S = 0.02


class Dying:
    """Answers what it is asked of itself, and closes the connection of every request for samples."""

    def __init__(self, **says: Any) -> None:
        self.says, self.num_asked, self.num_heard, self.lives = says, 0, 0, True
        self.hangs = False
        self._open: list[asyncio.StreamWriter] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
        self.num_heard += 1
        self.num_asked += path == "/rollout/generate"
        self._open.append(writer)
        if self.hangs:
            return
        if path != "/rollout/generate" and self.lives:
            body = json.dumps(self.says.get(path.strip("/"), {})).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()
        writer.close()

    def end(self) -> None:
        """As a kill does."""
        self.hangs = self.lives = False
        for writer in self._open:
            writer.transport.abort()


class Owner:
    """Of engines and of the router: what comes in the place of a lost one."""

    def __init__(self, url: str = "", *, holds_weights: bool = True, fails: Exception | None = None) -> None:
        self.num_made, self._url, self._holds_weights, self._fails = 0, url, holds_weights, fails

    async def is_lost(self, client: EngineClient, error: Exception) -> bool:
        return self.num_made == 0

    def _made(self) -> EngineClient:
        self.num_made += 1
        if self._fails is not None:
            raise self._fails
        return EngineClient(self._url)


class OfEngines(Owner):
    async def replace(self, index: int, error: Exception) -> tuple[EngineClient, bool]:
        return self._made(), self._holds_weights


class OfRouter(Owner):
    async def replace(self, error: EngineError) -> EngineClient:
        return self._made()


class InTurn(OfRouter):
    """One router after the other comes."""

    def __init__(self, *urls: str) -> None:
        super().__init__()
        self._urls = iter(urls)

    async def replace(self, error: EngineError) -> EngineClient:
        self._url = next(self._urls)
        return self._made()


def watched(route: Route, end: Callable[[], None]) -> Watched:
    return Watched(
        limit_s=60.0,
        key="supervision.router_s",
        has_work=lambda: route.has_work,
        progress=lambda: route.num_heard,
        end=end,
    )


@contextlib.asynccontextmanager
async def routed(router: str, *engines: str, mender: Any = None, owner: Any = None) -> AsyncIterator[EnginePool]:
    """Engines whose router is looked at, and is told of them."""
    route = Route(EngineClient(router), owner=owner, look_s=LOOK_S)
    pool = EnginePool([EngineClient(url) for url in engines], per_engine=8, mender=mender, route=route)
    await pool.negotiate()
    watching = asyncio.create_task(route.watch(pool.put_aside))
    try:
        yield pool
    finally:
        watching.cancel()
        await pool.close()


@on_a_loop
async def test_samples_come_through_the_router_and_weights_do_not() -> None:
    one, two = FakeEngine(-1), FakeEngine(-1)
    one.certificate = two.certificate = {"version": 4, "num_applied": 0, "digest": "d"}
    async with scene() as s, serving(one.app) as a, serving(two.app) as b, routed(s.url, a, b) as pool:
        await pool.sync({"version": 4, "buckets": [], "digest": "d"})
        assert [path for path, _ in one.updates + two.updates] == ["/update_weights_from_manifest"] * 2
        assert [(m.state, m.version) for m in s.router.pool.members.values()] == [("ready", 4)] * 2
        one.go.clear()
        two.go.clear()
        jobs = [asyncio.create_task(pool.generate(task_of(group, 0))) for group in range(4)]
        await until(lambda: len(one.bodies) + len(two.bodies) == 4)
        await until(lambda: pool.has_work(0) and pool.has_work(1))
        with pytest.raises(InvariantError, match="while 4 requests are at the engines"):
            await pool.sync({"version": 5, "buckets": [], "digest": "d"})
        one.go.set()
        two.go.set()
        answers = await asyncio.gather(*jobs)
        assert {answer.made_at for answer in answers} == {a, b}
        assert {request.headers["verst-weight-version"] for request in one.asked + two.asked} == {"4"}
        await until(lambda: not (pool.has_work(0) or pool.has_work(1)))
        assert "supervision/reissued" not in pool.metrics()


@on_a_loop
async def test_a_request_whose_engine_is_lost_is_made_again_once_by_the_one_in_its_place() -> None:
    lost, fresh = Dying(), FakeEngine()
    async with scene() as s, lost.serving() as gone, serving(fresh.app) as url:
        owner = OfEngines(url)
        async with routed(s.url, gone, mender=owner) as pool:
            assert (await pool.generate(task_of(3, 0))).made_at == url
            assert (lost.num_asked, owner.num_made) == (1, 1)
            assert [json.loads(body)["seeds"] for body in fresh.bodies] == [[0, 1]]
            assert list(s.router.pool.members) == [url]
            assert pool.metrics()["supervision/reissued"] == 1.0


@pytest.mark.parametrize(
    ("owner", "raised"),
    [
        ({"holds_weights": False}, StateLost),
        ({"fails": ProcessDied("the engine 0 process ended 4 times")}, ProcessDied),
    ],
)
@on_a_loop
async def test_a_request_that_no_engine_will_ever_take_does_not_wait_in_the_router(
    owner: dict[str, Any], raised: type[Exception]
) -> None:
    lost, other = Dying(), FakeEngine()
    async with (
        scene() as s,
        lost.serving() as gone,
        serving(other.app) as url,
        routed(s.url, gone, mender=OfEngines(url, **owner)) as pool,
    ):
        with pytest.raises(raised):
            await pool.generate(task_of(0, 0))
        assert other.bodies == []


@on_a_loop
async def test_where_nobody_brings_engines_back_the_end_of_one_is_that_of_its_requests() -> None:
    lost = Dying()
    async with scene() as s, lost.serving() as gone, routed(s.url, gone) as pool:
        lost.lives = False
        with pytest.raises(EngineError, match=f"engine {gone} was put aside by the router"):
            await pool.generate(task_of(0, 0))


@on_a_loop
async def test_what_an_engine_says_of_a_request_is_no_loss_of_it() -> None:
    engine, owner = FakeEngine(), OfEngines()
    engine.status, owner.num_made = 500, 1  # from here on nobody is lost
    async with scene() as s, serving(engine.app) as url, routed(s.url, url, mender=owner) as pool:
        with pytest.raises(EngineError, match="told to answer 500") as raised:
            await pool.generate(task_of(0, 0))
        assert (raised.value.engine, len(engine.bodies), owner.num_made) == (url, 1, 1)


@on_a_loop
async def test_requests_that_are_lost_with_the_router_go_through_the_next_which_knows_the_engines() -> None:
    engine, lost = FakeEngine(), Dying(engines=[])
    async with scene() as s, lost.serving() as gone, serving(engine.app) as url:
        owner = OfRouter(s.url)
        async with routed(gone, url, owner=owner) as pool:
            lost.lives = False
            answers = await asyncio.gather(*(pool.generate(task_of(group, 0)) for group in range(3)))
            assert [answer.made_at for answer in answers] == [url] * 3
            assert (lost.num_asked, owner.num_made, len(engine.bodies)) == (3, 1, 3)
            assert pool.metrics()["supervision/reissued"] == 3.0


@on_a_loop
async def test_a_router_that_hangs_is_found_by_what_it_does_not_answer() -> None:
    engine, stuck, supervisor = FakeEngine(), Dying(engines=[]), Supervisor(SupervisionConfig())
    async with (
        scene() as s,
        stuck.serving() as first,
        serving(engine.app) as url,
        routed(first, url, owner=OfRouter(s.url)) as pool,
    ):
        route = pool._route
        assert route is not None
        supervisor.watch("router", watched(route, stuck.end))
        supervisor.look(600.0)  # nobody asks it for anything
        stuck.hangs = True
        job = asyncio.create_task(pool.generate(task_of(0, 0)))
        await until(lambda: stuck.num_asked == 1)
        async with asyncio.timeout(60):
            while stuck.lives:
                supervisor.look(20.0)
                await asyncio.sleep(2 * LOOK_S)
            assert (await job).made_at == url
        assert (stuck.num_asked, len(engine.bodies)) == (1, 1)


@on_a_loop
async def test_a_router_that_hangs_before_anybody_could_ask_it_is_found() -> None:
    engine, lost, stuck, supervisor = FakeEngine(), Dying(engines=[]), Dying(), Supervisor(SupervisionConfig())
    stuck.hangs = True
    async with (
        scene() as s,
        lost.serving() as first,
        stuck.serving() as second,
        serving(engine.app) as url,
        routed(first, url, owner=InTurn(second, s.url)) as pool,
    ):
        route = pool._route
        assert route is not None
        supervisor.watch("router", watched(route, stuck.end))
        lost.lives = False
        job = asyncio.create_task(pool.generate(task_of(0, 0)))
        async with asyncio.timeout(60):
            await until(lambda: stuck.num_heard > 0)
            while stuck.lives:
                supervisor.look(20.0)
                await asyncio.sleep(2 * LOOK_S)
            assert (await job).made_at == url
        assert len(engine.bodies) == 1


def test_what_a_recipe_with_a_router_means(tmp_path: Path) -> None:
    plain, with_router = recipe_with(tmp_path), recipe_with(tmp_path, *ROUTED)
    roles = [process.role for process in process_plan(with_router)]
    assert set(roles) - {process.role for process in process_plan(plain)} == {"router"}
    assert set(kinds_of(with_router)) - set(kinds_of(plain)) == {"router"}
    path = write_recipe(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.router\.port = 4001 is an engine's: .* those up to 4001"):
        load_recipe(path, [*ROUTED, "engine.port=4000", "engine.router.port=4001"])
    with pytest.raises(ConfigError, match=r"supervision\.router_s = 1 is less than two looks"):
        load_recipe(path, ["supervision.router_s=1.0"])


@pytest.mark.ray
def test_a_run_whose_router_and_engines_are_killed_ends_like_one_without_a_router(tmp_path: Path) -> None:
    small = ("sampling.height=32", "sampling.width=32", "run.iterations=10", "checkpoint.every=5")
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    for folder in (calm, stormy):
        folder.mkdir()
    without = recipe_with(calm, *small)
    run_here(without)
    path, recipe = write_recipe(stormy), recipe_with(stormy, *small, *ROUTED)
    run = stormy / "runs" / "run"
    process = start_run(path, *small, *ROUTED)
    try:
        _wait(lambda: len(metric_rows(run)) > 1 or process.poll() is not None)
        (router,) = _pids(run)["router"]
        os.kill(router, signal.SIGKILL)
        _wait(lambda: _pids(run)["router"] != [router] or process.poll() is not None)
        seen = len(metric_rows(run))
        _wait(lambda: len(metric_rows(run)) > seen or process.poll() is not None)
        for engine in _pids(run)["engine"]:
            os.kill(engine, signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "through the router" in output
    assert_same(without, recipe)
    assert read_ledger(run / "trained.jsonl") == read_ledger(calm / "runs" / "run" / "trained.jsonl")
    events = [json.loads(line) for line in (run / "events" / "supervision.jsonl").read_text().splitlines()]
    back = [event["process"] for event in events if event["name"] == "restart"]
    assert back[0] == "router"
    assert set(back[1:]) & {"engine 0", "engine 1"}


def _pids(run: Path) -> dict[str, list[int]]:
    pids: dict[str, list[int]] = json.loads((run / "processes.json").read_text())
    return pids


def _wait(condition: Callable[[], bool], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
