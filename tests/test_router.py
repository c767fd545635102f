"""The router over HTTP: what passes through it and how, which engine is asked, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from engine_fixtures import folder, keys, request  # noqa: F401
from http_fixtures import serving
from loop_fixtures import on_a_loop
from prometheus_client.parser import text_string_to_metric_families
from router_fixtures import FakeEngine, Scene, scene, until

from verst.engine.client import EngineClient
from verst.engine.server import EngineServer
from verst.engine.wire import to_microgroup
from verst.engine.worker import Worker
from verst.errors import ConfigError, EchoError, EngineError, SyncError
from verst.router import server as router_server
from verst.router.options import RouterOptions
from verst.web.guard import bearer, new_token
from verst.web.terms import SHARED
from verst.weights.block import host_identity
from verst.weights.send import Outgoing, trained_tensors
from verst.weights.transports import ShmSender

PIECE = 64 * 2**10


@on_a_loop
async def test_an_answer_passes_as_it_is() -> None:
    engine = FakeEngine(7)
    pieces = [os.urandom(n) for n in (1, 100_000, 3, 700_000)]
    engine.answer, engine.answer_headers = (
        pieces,
        {"content-encoding": "zstd", "verst-raw-bytes": "99", "server-timing": "total;dur=1"},
    )
    async with scene(engine) as s:
        asked = {"prompt": "ä", "seeds": [1]}
        async with s.http.stream("POST", "/rollout/generate", json=asked, headers={"accept-encoding": "zstd"}) as got:
            body = b"".join([piece async for piece in got.aiter_raw()])
        assert body == b"".join(pieces)
        for name, value in (
            ("content-type", "application/msgpack"),
            ("content-encoding", "zstd"),
            ("verst-raw-bytes", "99"),
            ("server-timing", "total;dur=1"),
            ("verst-weight-version", "7"),
        ):
            assert got.headers[name] == value
        assert json.loads(engine.bodies[0]) == asked
        assert engine.asked[0].headers["accept-encoding"] == "zstd"


@pytest.mark.parametrize("status", [400, 404, 422, 500, 504])
@on_a_loop
async def test_what_an_engine_says_is_what_the_client_hears(status: int) -> None:
    engine = FakeEngine()
    engine.status = status
    async with scene(engine) as s:
        answer = await s.generate(prompt="1")
        assert (answer.status_code, answer.json()["detail"]) == (status, f"told to answer {status}")
        assert len(engine.bodies) == 1
        assert s.state(0) == "ready"


@on_a_loop
async def test_shared_memory_is_agreed_on_for_one_host_and_not_beyond() -> None:
    one, two = FakeEngine(host="a"), FakeEngine(host="a")
    accept = {"accept": f"{SHARED}, application/msgpack"}
    async with scene(one) as s:
        await s.generate(accept)
        assert one.asked[-1].headers["accept"] == "application/msgpack"  # nobody agreed on it here
        info = (await s.http.get("/server_info")).json()
        assert (info["host"], "shared_memory" in info) == ("a", True)
        await s.generate(accept)
        assert SHARED in one.asked[-1].headers["accept"]
        async with serving(two.app) as url:
            two.host = "b"
            await s.http.post("/engines", json={"url": url})
            await until(lambda: s.router.pool.members[url].state == "ready")
            assert "host" not in (await s.http.get("/server_info")).json()
            await asyncio.gather(s.generate(accept), s.generate(accept))
            assert SHARED in one.asked[-1].headers["accept"]
            assert two.asked[-1].headers["accept"] == "application/msgpack"
            await s.http.delete("/engines", params={"url": s.urls[0]})
            # Clients have agreed on a's memory, and will not be told of another one's.
            assert "host" not in (await s.http.get("/server_info")).json()


@on_a_loop
async def test_requests_go_round_and_wait_while_all_are_busy() -> None:
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.go.clear()
    async with scene(*engines, per_engine=2, queue_size=1) as s:
        jobs = [asyncio.create_task(s.generate(prompt=str(i))) for i in range(5)]
        await until(lambda: sum(len(engine.bodies) for engine in engines) == 4)
        await until(lambda: s.router._dispatcher.num_waiting == 1)
        refused = await s.generate(prompt="one too many")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "1 requests are waiting already" in refused.json()["detail"]
        assert [len(engine.bodies) for engine in engines] == [2, 2]
        for engine in engines:
            engine.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*jobs)} == {200}
        assert sum(len(engine.bodies) for engine in engines) == 5


@on_a_loop
async def test_a_dead_engine_is_put_aside_and_comes_back_by_itself() -> None:
    one, two = FakeEngine(), FakeEngine()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    async with scene(two) as s:
        async with serving(one.app, port=port):
            await s.http.post("/engines", json={"url": url})
            await until(lambda: s.router.pool.members[url].state == "ready")
            await asyncio.gather(*(s.generate(prompt="1") for _ in range(4)))
            assert len(one.bodies) > 0
        answers = await asyncio.gather(*(s.generate(prompt="1") for _ in range(4)))
        assert {answer.status_code for answer in answers} == {200}
        await until(lambda: s.router.pool.members[url].state == "quarantined")
        seen = len(one.bodies)
        async with serving(one.app, port=port):
            await until(lambda: s.router.pool.members[url].state == "ready")
            await asyncio.gather(*(s.generate(prompt="1") for _ in range(4)))
            assert len(one.bodies) > seen


async def _drops(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Looks well, and closes the connection of whoever wants samples."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b"/rollout/generate" not in head:
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 20\r\nConnection: close\r\n\r\n{"weight_version":0}')
        await writer.drain()
    writer.close()


@on_a_loop
async def test_a_request_lost_with_its_engine_is_made_again_once() -> None:
    good = FakeEngine()
    drops = [await asyncio.start_server(_drops, "127.0.0.1", 0) for _ in range(2)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in drops]
    async with drops[0], drops[1], scene(good, probe_s=60.0) as s:
        await s.http.post("/engines", json={"url": urls[0]})
        await until(lambda: s.router.pool.members[urls[0]].state == "ready")
        answers = await asyncio.gather(*(s.generate(prompt=str(i), seeds=[i]) for i in range(2)))
        assert [answer.status_code for answer in answers] == [200, 200]
        assert sorted(json.loads(body)["seeds"] for body in good.bodies) == [[0], [1]]
        assert sorted(answer.headers["verst-reissued"] for answer in answers) == ["0", "1"]
        assert s.router.pool.members[urls[0]].state == "quarantined"
        # Lost over two engines: given up, before it ends them all.
        await s.http.delete("/engines", params={"url": s.urls[0]})
        await s.http.delete("/engines", params={"url": urls[0]})
        for url in urls:
            await s.http.post("/engines", json={"url": url})
        await until(lambda: all(s.router.pool.members[url].state == "ready" for url in urls))
        answer = await s.generate(prompt="1")
        assert answer.status_code == 502
        assert "2 engines were lost over this request" in answer.json()["detail"]
        # The first of either request: none followed the last loss.
        assert 'verst_router_retries_total{reason="lost"} 2.0' in (await s.http.get("/metrics")).text


@on_a_loop
async def test_an_answer_that_breaks_off_is_not_taken_for_whole() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = b"half" if b"/rollout/generate" in head else b'{"weight_version":0}'
        size = 100 if b"/rollout/generate" in head else len(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % size + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, scene(engines=(url,)) as s:
        with pytest.raises(httpx.RemoteProtocolError):
            await s.generate(prompt="1")
        assert s.router.pool.members[url].num_failed == 1


@on_a_loop
async def test_a_request_waits_for_the_weights_that_it_names() -> None:
    old, new = FakeEngine(3), FakeEngine(4)
    async with scene(old, new, max_staleness=1) as s:
        s.router.pool.handed_out(4)
        for _ in range(3):
            await s.generate({"verst-weight-version": "4"})
            await s.generate({"verst-min-weight-version": "4"})
            await s.generate({"verst-weight-version": "3"})
        assert (len(old.bodies), len(new.bodies)) == (3, 6)
        refused = await s.generate({"verst-weight-version": "2"})
        assert refused.status_code == 409
        assert "the newest are 4" in refused.json()["detail"]
        waits = asyncio.create_task(s.generate({"verst-weight-version": "5"}))
        await until(lambda: s.router._dispatcher.num_waiting == 1)
        old.version = 5  # updated past the router
        answer = await waits
        assert (answer.status_code, answer.headers["verst-weight-version"]) == (200, "5")
        assert (await s.generate({"verst-weight-version": "3"})).status_code == 409
        late = await s.generate({"verst-weight-version": "6", "verst-timeout-s": "0.1"})
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert "holds weights of version 5" in late.json()["detail"]


@pytest.mark.parametrize("enforces", [True, False])
@on_a_loop
async def test_an_engine_that_was_updated_unseen_makes_nothing_for_the_old_weights(enforces: bool) -> None:
    moved, other = FakeEngine(3, enforces=enforces), FakeEngine(3)
    async with scene(moved, other, probe_s=60.0, max_staleness=1) as s:
        moved.version = 4
        answers = await asyncio.gather(*(s.generate({"verst-weight-version": "3"}) for _ in range(4)))
        assert [answer.headers["verst-weight-version"] for answer in answers] == ["3"] * 4
        await until(lambda: s.router.pool.current == 4)


@on_a_loop
async def test_the_time_that_is_left_goes_on_to_the_engine() -> None:
    engine = FakeEngine()
    engine.go.clear()
    async with scene(engine, per_engine=1, request_timeout_s=60.0) as s:
        first = asyncio.create_task(s.generate())
        await until(lambda: len(engine.asked) == 1)
        assert 0.0 < float(engine.asked[0].headers["verst-timeout-s"]) <= 60.0
        waits = await s.generate({"verst-timeout-s": "0.1"})
        assert waits.status_code == 503
        first.cancel()
        await until(lambda: engine.num_left == 1)
        await until(lambda: s.router.pool.members[s.urls[0]].in_flight == 0)
        late = await s.generate({"verst-timeout-s": "1.0"})
        assert late.status_code == 504
        assert float(engine.asked[1].headers["verst-timeout-s"]) <= 1.0
        await until(lambda: engine.num_left == 2)
        assert s.state(0) == "ready"  # the time was the request's


@on_a_loop
async def test_a_client_that_goes_away_takes_its_work_with_it() -> None:
    engine = FakeEngine()
    engine.go.clear()
    async with scene(engine, per_engine=1) as s:
        at_work = asyncio.create_task(s.generate(prompt="made"))
        await until(lambda: len(engine.bodies) == 1)
        waiting = asyncio.create_task(s.generate(prompt="waits"))
        await until(lambda: s.router._dispatcher.num_waiting == 1)
        waiting.cancel()
        await until(lambda: s.router._dispatcher.num_waiting == 0)
        at_work.cancel()
        await until(lambda: engine.num_left == 1)
        member = s.router.pool.members[s.urls[0]]
        await until(lambda: member.in_flight == 0)
        assert len(engine.bodies) == 1
        assert (await counts(s))["verst_router_cancelled_total"] == 2


@on_a_loop
async def test_what_clients_do_not_take_is_not_fetched() -> None:
    """16 answers of 256 MiB, and clients that read nothing: the router holds a piece of each, the rest stays where it is."""
    engine = FakeEngine()
    piece = bytes(2**20)
    engine.answer = [piece] * 256
    async with scene(engine) as s:
        port = int(s.url.rsplit(":", 1)[1])
        loop = asyncio.get_running_loop()
        clients = [socket.socket() for _ in range(16)]
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(
                client, b"POST /rollout/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
            )
        sent, still = -1, 0
        while still < 5 or len(engine.bodies) < 16:
            still = still + 1 if sent == engine.num_sent else 0
            sent = engine.num_sent
            await asyncio.sleep(0.1)
        # What left the engine lies in the sockets of both hops.
        assert engine.num_sent < 16 * 32 * 2**20
        seen = await counts(s)
        assert 0 < seen["verst_router_in_hand_bytes"] <= 16 * PIECE
        assert seen["verst_router_relayed_bytes_total"] <= engine.num_sent
        for client in clients:
            client.close()
        member = s.router.pool.members[s.urls[0]]
        await until(lambda: member.in_flight == 0)
        assert member.num_served == 0
        assert (await counts(s))["verst_router_in_hand_bytes"] == 0


async def counts(s: Scene) -> dict[str, float]:
    """Values of /metrics; of those with labels, name{label=value,...}."""
    response = await s.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


@on_a_loop
async def test_the_counts_say_what_happened() -> None:
    good, bad = FakeEngine(2), FakeEngine(2)
    bad.status = 503
    async with scene(good, bad) as s:
        answers = await asyncio.gather(*(s.generate(prompt="1") for _ in range(3)))
        assert {answer.status_code for answer in answers} == {200}
        assert (await s.http.post("/rollout/generate", content=b"{")).status_code == 400
        assert len(bad.bodies) > 0
        seen = await counts(s)
        assert seen["verst_router_requests_total{status=200}"] == 3
        assert seen["verst_router_requests_total{status=400}"] == 1
        assert seen[f"verst_router_engine_served{{engine={s.urls[0]}}}"] == 3
        assert seen["verst_router_relayed_bytes_total"] == 3 * len(b"an answer")
        assert seen["verst_router_retries_total{reason=busy}"] == len(bad.bodies)
        assert seen[f"verst_router_engine_state{{engine={s.urls[1]},state=ready}}"] == 1
        assert seen["verst_router_weight_version"] == 2
        assert seen["verst_router_answer_seconds_count"] == 3


@on_a_loop
async def test_engines_come_and_go_at_run_time() -> None:
    one, two = FakeEngine(), FakeEngine()
    async with scene(one) as s, serving(two.app) as url:
        assert (await s.http.post("/engines", json={"url": url.upper()})).json()["url"] == url
        await until(lambda: s.router.pool.members[url].state == "ready")
        rows = (await s.http.get("/engines")).json()
        assert [row["url"] for row in rows] == [*s.urls, url]
        one.go.clear()
        job = asyncio.create_task(s.generate(prompt="1"))
        await until(lambda: len(one.bodies) == 1)
        assert (await s.http.delete("/engines", params={"url": s.urls[0]})).json()["in_flight"] == 1
        for _ in range(3):
            assert (await s.generate(prompt="2")).status_code == 200
        assert (len(one.bodies), len(two.bodies)) == (1, 3)
        one.go.set()
        assert (await job).status_code == 200
        await until(lambda: list(s.router.pool.members) == [url])
        gone = await s.http.delete("/engines", params={"url": s.urls[0]})
        assert (gone.status_code, url in gone.json()["detail"]) == (400, True)
        await s.http.delete("/engines", params={"url": url})
        none = await s.generate({"verst-timeout-s": "0.05"})
        assert none.status_code == 503
        assert "there are no engines: add one with POST /engines" in none.json()["detail"]
        assert (await s.http.get("/health")).status_code == 503


@on_a_loop
async def test_whoever_hands_out_weights_says_which_engines_there_are_and_what_they_hold() -> None:
    one, two = FakeEngine(7), FakeEngine(7)
    async with scene(one, probe_s=60.0) as s, serving(two.app) as url, EngineClient(s.url) as client:
        rows = await client.put_engines([*s.urls, url], weight_version=7)
        assert [(row["url"], row["state"], row["weight_version"]) for row in rows] == [
            (s.urls[0], "ready", 7),
            (url, "ready", 7),
        ]
        one.version = two.version = 8
        await client.put_engines([*s.urls, url], weight_version=8)
        answer = await s.generate({"verst-weight-version": "8", "verst-timeout-s": "5"})
        assert (answer.status_code, answer.headers["verst-reissued"]) == (200, "0")
        assert answer.headers["verst-engine"] in (*s.urls, url)
        one.version = two.version = 5  # a trainer that began again from a checkpoint
        await client.put_engines([url], weight_version=5)
        assert [row["url"] for row in await client.engines()] == [url]
        answer = await s.generate({"verst-weight-version": "5", "verst-timeout-s": "5"})
        assert (answer.status_code, answer.headers["verst-engine"]) == (200, url)
        for body in ({}, {"engines": url}, {"engines": [url], "weight_version": True}, {"engines": [], "more": 1}):
            assert (await s.http.put("/engines", json=body)).status_code == 400
        assert list(s.router.pool.members) == [url]
        two.status = 500
        with pytest.raises(EngineError, match="told to answer 500") as failed:
            await client.generate(request())
        assert failed.value.engine == url
        two.status, two.version, two.enforces = 200, None, False  # an engine that knows of no versions
        await client.put_engines([url], weight_version=6)
        assert (await s.generate({"verst-weight-version": "6", "verst-timeout-s": "5"})).status_code == 200
        two.healthy = False
        (row,) = await client.put_engines([url], weight_version=5)
        assert (row["state"], row["silent"]) == ("ready", False)  # one bad look is no end yet


NO_ADDRESSES = (
    *("", "127.0.0.1:30000", "ftp://h:1", "http://", "http://u:p@h:1", "http://h:1/path", "http://h:x"),
    *("http://h:1?q", "file:///etc/passwd", "http://[::1", "http://h:99999", 7, None, ["http://h:1"]),
)


@on_a_loop
async def test_addresses_that_are_none() -> None:
    async with scene(FakeEngine()) as s:
        for url in NO_ADDRESSES:
            refused = await s.http.post("/engines", json={"url": url})
            assert refused.status_code == 400, url
            assert "is not the address of an engine" in refused.json()["detail"]
        assert len(s.router.pool.members) == 1


MANIFEST = {"version": 5}


@on_a_loop
async def test_new_weights_reach_every_engine_before_any_request_does() -> None:
    one, two = FakeEngine(4), FakeEngine(4)
    async with scene(one, two) as s:
        one.go.clear()
        before = asyncio.create_task(s.generate({"verst-weight-version": "4"}))
        await until(lambda: len(one.bodies) == 1)
        update = asyncio.create_task(s.http.post("/update_weights_from_manifest", json=MANIFEST))
        await until(lambda: all(member.updating for member in s.router.pool.members.values()))
        after = asyncio.create_task(s.generate({"verst-weight-version": "5"}))
        await until(lambda: s.router._dispatcher.num_waiting == 1)
        assert one.updates == two.updates == []  # while the first request is being made
        one.go.set()
        report = (await update).json()
        assert (await before).headers["verst-weight-version"] == "4"
        assert (await after).headers["verst-weight-version"] == "5"
        assert (report["success"], report["weight_version"], report["certificate"]) == (True, 5, {"digest": "d"})
        assert set(report["engines"]) == set(s.urls)
        assert s.router.pool.current == 5


@on_a_loop
async def test_an_update_that_one_engine_misses_is_reported_and_that_engine_gets_nothing() -> None:
    one, two = FakeEngine(4), FakeEngine(4)
    async with scene(one, two) as s:
        two.update_status = 500
        failed = await s.http.post("/update_weights_from_manifest", json=MANIFEST)
        assert failed.status_code == 502
        assert f"1 of 2 engines did not: {s.urls[1]}: no such tensor" in failed.json()["detail"]
        two.update_status = 200
        assert (await s.http.post("/update_weights_from_manifest", json=MANIFEST)).status_code == 200
        two.version = 4  # as after a restart from the checkpoint it began with
        await until(lambda: s.router.pool.members[s.urls[1]].version == 4)
        two.bodies.clear()
        answers = await asyncio.gather(*(s.generate(prompt="1") for _ in range(4)))
        assert {answer.headers["verst-weight-version"] for answer in answers} == {"5"}
        assert two.bodies == []


@on_a_loop
async def test_a_refusal_by_all_is_a_refusal_and_changes_nothing() -> None:
    one, two = FakeEngine(4), FakeEngine(4)
    one.update_status = two.update_status = 400
    async with scene(one, two) as s:
        refused = await s.http.post("/update_weights_from_manifest", json=MANIFEST)
        assert (refused.status_code, "no such tensor" in refused.json()["detail"]) == (400, True)
        assert (await s.generate({"verst-weight-version": "4"})).status_code == 200
        for path in ("/update_weights_from_tensor", "/update_weights_from_tensor_checker"):
            named = await s.http.post(path, json={})
            assert (named.status_code, "/update_weights_from_manifest" in named.json()["detail"]) == (400, True)


@on_a_loop
async def test_engines_that_took_different_weights_are_not_called_equal() -> None:
    one, two = FakeEngine(4), FakeEngine(4)
    two.certificate = {"digest": "another"}
    async with scene(one, two) as s:
        failed = await s.http.post("/update_weights_from_manifest", json=MANIFEST)
        assert (failed.status_code, "'another'" in failed.json()["detail"]) == (502, True)
        assert (await s.http.post("/get_weights_checksum", json={})).json() == {"transformer": "sum of 5"}
        one.version = 6
        differ = await s.http.post("/get_weights_checksum", json={})
        assert (differ.status_code, "sum of 6" in differ.json()["detail"]) == (502, True)


@on_a_loop
async def test_an_engine_that_answers_an_update_with_no_record_did_not_take_it() -> None:
    one, two = FakeEngine(4), FakeEngine(4)
    two.says = ["done"]
    async with scene(one, two) as s:
        for path in ("/update_weights_from_manifest", "/release_memory_occupation", "/get_weights_checksum"):
            failed = await s.http.post(path, json=MANIFEST)
            assert failed.status_code == 502
            assert f"1 of 2 engines did not: {s.urls[1]}: answered what is no JSON record" in failed.json()["detail"]


@on_a_loop
async def test_what_the_model_is_is_asked_of_the_next_engine_where_one_is_gone() -> None:
    one, two = FakeEngine(), FakeEngine()
    async with scene(probe_s=60.0) as s:
        async with serving(one.app) as gone:
            await s.http.post("/engines", json={"url": gone})
            await until(lambda: s.router.pool.members[gone].state == "ready")
        lost = await s.http.get("/model_info")
        assert (lost.status_code, gone in lost.json()["detail"]) == (503, True)
        async with serving(two.app) as url:
            await s.http.post("/engines", json={"url": url})
            await until(lambda: s.router.pool.members[url].state == "ready")
            assert (await s.http.get("/model_info")).json() == {"model_type": "diffusion"}


@on_a_loop
async def test_memory_is_released_and_taken_back_everywhere() -> None:
    one, two = FakeEngine(), FakeEngine()
    async with scene(one, two) as s:
        assert (await s.http.post("/release_memory_occupation", json={})).status_code == 200
        assert [s.state(0), s.state(1), one.asleep, two.asleep] == ["asleep", "asleep", True, True]
        assert (await s.generate({"verst-timeout-s": "0.05"})).status_code == 503
        assert (await s.http.get("/health")).status_code == 200
        assert (await s.http.post("/resume_memory_occupation")).status_code == 200
        assert (await s.generate()).status_code == 200
        assert (await s.http.post("/rollout/check_prompts", json={"prompts": []})).json() == ["seen by 0"]
        assert (await s.http.get("/model_info")).json() == {"model_type": "diffusion"}


@on_a_loop
async def test_the_token_is_wanted_and_shown() -> None:
    token = new_token()
    engine = FakeEngine()
    async with scene(engine, token=token) as s:
        for path in ("/engines", "/metrics", "/server_info", "/health"):
            assert (await s.http.get(path)).status_code == 401
        assert (await s.generate()).status_code == 401
        assert engine.bodies == []
        assert (await s.http.get("/liveness")).status_code == 200
        assert (await s.generate(bearer(token))).status_code == 200
        assert engine.asked[0].headers["authorization"] == f"Bearer {token}"
        assert token not in (await s.http.get("/server_info", headers=bearer(token))).text
    with pytest.raises(ConfigError, match=r"--host = '0\.0\.0\.0' can be reached"):
        router_server.serve(RouterOptions(), host="0.0.0.0", port=0, token=None)


@on_a_loop
async def test_a_client_of_the_router_has_two_engines_that_are_one(folder: Path) -> None:  # noqa: F811
    """Real engines: shared memory agreed on, weights with one certificate, samples of those alone."""
    servers = [EngineServer(folder, threads=1) for _ in range(2)]
    try:
        for server in servers:
            # One after the other: transformers builds models under a setting of the whole process.
            server.start()
            await asyncio.to_thread(server.wait_ready, 60)
        named = {n: p + 0.01 for n, p in Worker(folder).components.transformer.named_parameters()}
        tensors = trained_tensors(named, dtype=torch.float32)
        async with (
            scene(engines=tuple(server.url for server in servers)) as s,
            EngineClient(s.url, transport="auto", busy_s=0.2) as client,
        ):
            assert await client.negotiate() == "shm: engine and readers share a host"
            dtypes = dict.fromkeys(tensors, torch.float32)
            sender = ShmSender(rank=0, bucket_bytes=2**24)
            manifest = sender.publish(Outgoing(version=3, tensors=tensors, dtypes=dtypes, lora=None))
            assert manifest is not None
            assert (await client.update_weights(manifest))["version"] == 3
            with pytest.raises(SyncError, match="took no weights"):
                await client.update_weights({**manifest, "transport": "pigeon"})
            answers = await asyncio.gather(*(client.generate(request(), weight_version=3) for _ in range(4)))
            for answer in answers:
                assert answer.shared is not None
                microgroup = to_microgroup(answer, keys(2))
                assert microgroup.echo["weight_version"] == 3
            assert {server._batcher.num_batches for server in servers} == {2}  # type: ignore[union-attr]
            with pytest.raises(EchoError, match="weights of version 2"):
                await client.generate(request(), weight_version=2)
            await client.release_memory()
            await client.resume_memory()
            assert len(await client.checksum(["transformer"])) == 1
            sender.close()
        assert host_identity() == s.router._proxy._shared_host
    finally:
        for server in servers:
            server.stop()


def test_the_command_says_where_it_is_and_keeps_its_token_to_itself(tmp_path: Path) -> None:
    token = new_token()
    command = [sys.executable, "-m", "verst.cli.main", "router", "--port", "0", "--engines", "http://127.0.0.1:9"]
    bare = {name: value for name, value in os.environ.items() if name != "VERST_TOKEN"}
    refused = subprocess.run([*command, "--host", "0.0.0.0"], env=bare, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "set the environment variable VERST_TOKEN" in refused.stderr
    with (tmp_path / "log").open("w+") as log:
        env = {**bare, "VERST_TOKEN": token}
        process = subprocess.Popen(
            [*command, "--host", "0.0.0.0"], env=env, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        port = line.strip().rsplit(":", 1)[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as http:
            assert http.get("/engines").status_code == 401
            (row,) = http.get("/engines", headers=bearer(token)).json()
            assert row["url"] == "http://127.0.0.1:9"
        seen = Path(f"/proc/{process.pid}/cmdline")
        assert not seen.exists() or token not in seen.read_text()
        process.terminate()
        # uvicorn ends in order, and then by the signal that it was sent.
        assert process.wait(20) in (0, -signal.SIGTERM)
        log.seek(0)
        assert token not in line + process.stdout.read() + log.read()
        process.stdout.close()
