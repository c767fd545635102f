"""How responses travel: the same tensors by every way, one copy of them, and no memory left by whoever dies."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import multiprocessing as mp
import os
import resource
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import torch
from engine_fixtures import folder, keys, request  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_fixtures import calls_in, on_a_loop

from verst.engine import blocks
from verst.engine.blocks import BlockHandle, BlockPool, TensorHandle, handle_of, open_block, open_tensor
from verst.engine.client import EngineClient, check_echo
from verst.engine.resolve import resolve
from verst.engine.server import EngineServer
from verst.engine.transport import Accepted, receive, ship
from verst.engine.wire import Answer, GenerateRequest, decode_response, encode_response, share_response, to_microgroup
from verst.engine.worker import Worker
from verst.errors import ConfigError, EngineError
from verst.obs.loop_lag import LoopLag
from verst.rollout.pipeline import ScoredMicrogroup, assemble
from verst.rollout.plan import MicrogroupTask
from verst.types import Microgroup, SampleKey, Scores, stack_rows
from verst.weights.block import SharedBlock

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def samples(dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Two samples: large, small, empty, scalar and strided tensors."""
    made = []
    for i in range(2):
        torch.manual_seed(i)
        large = (torch.randn(40, 30, 8) * 4).to(dtype)
        tensors = [large, large[1:].transpose(0, 2), large[0, 0], large[:0], large[0, 0, 0]]
        made.append({"tensors": tensors, "number": i, "text": "ä", "nothing": None})
    return made


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return all(map(same, a, b)) and len(a) == len(b) if isinstance(a, list) else a == b


def shared(pool: BlockPool, records: list[dict[str, Any]]) -> Answer:
    sent = share_response(records, pool)
    assert sent is not None
    return Answer(body=sent[0], shared=open_block(sent[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tensor_comes_back_by_shared_memory_and_in_a_message(dtype: torch.dtype) -> None:
    pool, records = BlockPool(2**22), samples(dtype)
    answer = shared(pool, records)
    got = decode_response(answer)
    assert same(got, records)
    assert len(answer.body) < 2000  # the large ones are not in it
    assert answer.portable() == encode_response(records)
    assert same(decode_response(answer.portable()), records)
    lent = got[1]["tensors"][1]
    again = open_tensor(TensorHandle(*handle_of(lent)))  # type: ignore[misc]
    assert torch.equal(again, lent)
    assert again.data_ptr() == lent.data_ptr()


def test_equal_tensors_of_samples_lie_beside_each_other() -> None:
    pool = BlockPool(2**22)
    records = [{"a": torch.zeros(5000), "b": torch.zeros(3000)} for _ in range(3)]
    records[0]["c"] = torch.zeros(7000)
    got = decode_response(shared(pool, records))
    steps = [y["a"].data_ptr() - x["a"].data_ptr() for x, y in itertools.pairwise(got)]
    assert steps == [20032, 20032]


def test_values_of_a_message_lie_aligned_and_are_views_of_it() -> None:
    records = [{"x": "a" * n, "t": torch.arange(4 + n, dtype=torch.float64)} for n in range(5)]
    body = torch.frombuffer(bytearray(encode_response(records)), dtype=torch.uint8)
    start, end = body.data_ptr(), body.data_ptr() + len(body)
    for record in decode_response(Answer(body=body)):
        at = record["t"].data_ptr()
        assert start <= at < end
        assert (at - start) % 64 == 0


def test_a_block_is_used_again_when_the_last_view_of_it_is_gone() -> None:
    pool = BlockPool(2**22)
    first = shared(pool, samples())
    part = decode_response(first)[1]["tensors"][0][3, 4:]
    other = shared(pool, samples())
    assert (pool.num_bytes // pool._blocks[0].capacity, pool.num_held) == (2, 2)
    del first
    assert pool.num_held == 2  # `part` reads it
    del part
    assert pool.num_held == 1
    assert same(decode_response(other), samples())
    third = shared(pool, samples())
    assert pool.num_held == 2
    assert len(pool._blocks) == 2  # the first one again
    del other, third
    assert (pool.num_held, blocks._mapped) == (0, {})


def test_the_work_for_an_answer_is_the_same_however_many_are_held() -> None:
    pool = BlockPool(2**30)
    held = [shared(pool, samples()) for _ in range(60)]

    def one() -> None:
        held.append(shared(pool, samples()))
        assert handle_of(decode_response(held[-1])[0]["tensors"][0]) is not None

    one()
    few = calls_in(one)
    held += [shared(pool, samples()) for _ in range(240)]
    assert calls_in(one) <= 1.05 * few
    held.clear()
    assert (pool.num_held, blocks._mapped, blocks._starts) == (0, {}, [])
    for _ in range(40):  # what is free again is found, a few looks at a time
        shared(pool, samples())
    assert len(pool._blocks) == 303


def test_blocks_leave_a_quarter_of_the_open_files_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    pool, held = BlockPool(2**24), []
    while (sent := share_response(samples(), pool)) is not None:
        held.append(Answer(body=sent[0], shared=open_block(sent[1])))
    assert len(held) == 8  # two files for each block of the pool, and two for each that is mapped
    assert ship(samples(), Accepted(shared=True), pool).block is None
    assert not blocks.allows_more_files()
    del held
    assert blocks.allows_more_files()
    assert share_response(samples(), pool) is not None  # in a block that is free again


def test_a_block_that_cannot_be_mapped_leaves_no_file_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = set(os.listdir("/proc/self/fd"))
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[1], limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            SharedBlock(4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_bound_holds_and_what_finds_no_room_is_sent() -> None:
    pool = BlockPool(200_000)
    records = [{"t": torch.zeros(40_000)}]
    kept = shared(pool, records)
    assert share_response(records, pool) is None
    shipment = ship(records, Accepted(shared=True), pool)
    assert (shipment.block, pool.num_refused) == (None, 2)
    assert pool.num_bytes <= 200_000
    del kept
    assert ship(records, Accepted(shared=True), pool).block is not None
    small = BlockPool(200_000)
    assert small.take(10_000) is not None
    block = small.take(100_000)
    assert block is not None
    small.put_back(block)
    assert small.take(120_000) is not None  # in place of the free one, which is too small
    assert len(small._blocks) == 2


def test_what_nobody_opens_is_taken_back_and_cannot_be_opened_then() -> None:
    now = 0.0
    pool = BlockPool(2**20, unclaimed_s=5.0, clock=lambda: now)
    sent = share_response(samples(), pool)
    assert sent is not None
    assert pool.num_held == 1
    now = 6.0
    assert pool.num_held == 0
    with pytest.raises(EngineError, match="taken back"):
        open_block(sent[1])
    later = share_response(samples(), pool)
    assert later is not None
    with pytest.raises(EngineError, match="of another answer by now"):
        open_block(sent[1])
    held = open_block(later[1])
    now = 100.0
    assert pool.num_held == 1
    del held
    assert pool.num_held == 0


def test_who_writes_into_an_answer_changes_his_own_copy_alone() -> None:
    pool = BlockPool(2**20)
    sent = share_response([{"t": torch.ones(2000)}], pool)
    assert sent is not None
    answer = Answer(body=sent[0], shared=open_block(sent[1]))
    decode_response(answer)[0]["t"].zero_()
    assert pool._blocks[0].data[:8000].view(torch.float32).sum() == 2000


def test_a_handle_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    with pytest.raises(EngineError, match=r"cannot be opened .it is no block of ours"):
        open_block(BlockHandle(str(tmp_path / "file"), "00" * 16, 1, 100))
    other = SharedBlock(10_000)
    with pytest.raises(EngineError, match="of another answer"):
        open_block(BlockHandle(other.handle, "00" * 16, 1, 100))
    with pytest.raises(EngineError, match="announced were 104096"):
        open_block(BlockHandle(other.handle, "00" * 16, 1, 100_000))
    other.close()
    with pytest.raises(EngineError, match=r'rollout\.transport = "msgpack"'):
        open_block(BlockHandle("/proc/1/fd/none", "00" * 16, 1, 100))
    assert handle_of(torch.zeros(3)) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=3))
def test_the_reader_agrees_with_msgpack(records: list[dict[str, Any]]) -> None:
    assert (
        decode_response(encode_response(records))
        == records
        == msgpack.unpackb(msgpack.packb(records), strict_map_key=False)
    )
    assert decode_response(msgpack.packb(records)) == records


GOOD = encode_response([{"t": torch.arange(6.0), "s": [1, "x", None], "echo": {"a": 2.5}}])
SHARED_GOOD = msgpack.packb([{"__shared__": True, "offset": 64, "shape": [2, 3], "dtype": "torch.float32"}])


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=60)
    | st.integers(0, len(GOOD) - 1).map(lambda n: GOOD[:n])
    | st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)).map(
        lambda c: GOOD[: c[0]] + bytes([c[1]]) + GOOD[c[0] + 1 :]
    )
    | st.tuples(st.integers(0, len(SHARED_GOOD) - 1), st.integers(0, 255)).map(
        lambda c: SHARED_GOOD[: c[0]] + bytes([c[1]]) + SHARED_GOOD[c[0] + 1 :]
    )
)
def test_a_damaged_response_is_an_engine_error_or_a_list_of_samples(body: bytes) -> None:
    block = torch.zeros(256, dtype=torch.uint8)
    for answer in (Answer(body=body), Answer(body=body, shared=block)):
        try:
            records = decode_response(answer)
        except EngineError:
            continue
        assert all(isinstance(record, dict) for record in records)


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 5000,  # nested without end
        b"\xdd\xff\xff\xff\xff",  # four thousand million values announced
        msgpack.packb([{"t": {"__tensor__": True, "data": b"\x00" * 8, "shape": [], "dtype": "torch.float32"}}]),
        msgpack.packb([{"t": {"__tensor__": True, "data": "text"}}]),
        msgpack.packb([{"t": {"__shared__": True, "offset": 0, "shape": [1], "dtype": "torch.float32"}}]),
        msgpack.packb([{"a": msgpack.ExtType(5, b"x")}]),
        GOOD + b"\xc0",
    ],
)
def test_malformed_responses_are_refused(body: bytes) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        decode_response(body)


@pytest.mark.parametrize(("offset", "shape"), [(0, [65]), (192, [17]), (256, [1]), (3, [1]), (0, [-1]), (True, [1])])
def test_a_tensor_outside_its_block_is_refused(offset: int, shape: list[int]) -> None:
    record = {"__shared__": True, "offset": offset, "shape": shape, "dtype": "torch.float32"}
    with pytest.raises(EngineError, match="cannot be read"):
        decode_response(Answer(body=msgpack.packb([{"t": record}]), shared=torch.zeros(256, dtype=torch.uint8)))


def test_what_is_accepted_says_so_in_headers() -> None:
    for accepted in (Accepted(), Accepted(shared=True), Accepted(codec="zstd"), Accepted(shared=True, codec="lz4")):
        assert Accepted.of(accepted.headers()) == accepted
    assert Accepted.of({"accept": "*/*", "accept-encoding": "gzip, deflate, br, zstd"}) == Accepted()


async def over_http(records: list[dict[str, Any]], accepted: Accepted, sender: BlockPool, pool: BlockPool) -> Answer:
    """Through the server's response and the client's reader, in one process."""

    async def app(scope: Any, receive_: Any, send: Any) -> None:
        await ship(records, Accepted.of(httpx.Headers(scope["headers"])), sender).response()(scope, receive_, send)

    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http,
        http.stream("POST", "/", headers=accepted.headers()) as response,
    ):
        return await receive(response, pool)


@pytest.mark.parametrize("accepted", [Accepted(), Accepted(shared=True), Accepted(codec="zstd"), Accepted(codec="lz4")])
@on_a_loop
async def test_a_response_is_the_same_by_every_way(accepted: Accepted) -> None:
    records = [{**sample, "more": torch.randn(1_500_000)} for sample in samples()]  # more than a frame
    sender, pool = BlockPool(2**25), BlockPool(2**25)
    answer = await over_http(records, accepted, sender, pool)
    got = decode_response(answer)
    assert same(got, records)
    assert (sender.num_held, pool.num_held) == ((1, 0) if accepted.shared else (0, 1))
    assert all(handle_of(record["more"]) is not None for record in got)  # what follows maps it, whichever way it came
    plain = await over_http(records, accepted, BlockPool(0), BlockPool(0))
    assert same(decode_response(plain), records)


@on_a_loop
async def test_a_body_of_another_size_than_announced_is_refused() -> None:
    async def read(body: bytes, headers: dict[str, str]) -> None:
        async def stream() -> Any:
            yield body

        response = httpx.Response(200, headers=headers, content=stream())
        pool = BlockPool(2**20)
        with pytest.raises(EngineError, match=r"announced|ends in the middle|cannot be read"):
            await receive(response, pool)
        assert pool.num_held == 0

    await read(b"x" * 10, {"content-length": "11"})
    await read(b"x" * 10, {"content-length": "9"})
    coded = {"content-encoding": "zstd", "verst-raw-bytes": "4"}
    await read(b"x" * 7, coded)
    await read(b"\x04\0\0\0\x04\0\0\0abcd", coded)
    await read(b"\x04\0\0\0\xff\xff\xff\xffabcd", coded)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EngineServer]:  # noqa: F811
    server = EngineServer(folder)
    server.start()
    server.wait_ready()
    yield server
    server.stop()


def flat(microgroup: Microgroup) -> list[torch.Tensor]:
    tensors = [*microgroup.conditioning.positive.values()]
    for sample in microgroup.samples:
        tensors += [sample.media, *(t for s in sample.streams.values() for t in (s.latents, s.log_probs, s.sigmas))]
    return tensors


@on_a_loop
async def test_engine_and_client_agree_on_a_way_and_every_way_gives_the_same_bits(server: EngineServer) -> None:
    got = []
    pool = BlockPool(2**24)
    for options, expected in [
        ({}, "msgpack"),
        ({"transport": "auto"}, "shm"),
        ({"transport": "shm"}, "shm"),
        ({"transport": "auto", "hosts": ["another"], "compression": "zstd"}, "msgpack: engine .* is on host"),
    ]:
        async with EngineClient(server.url, pool=pool, **options) as client:  # type: ignore[arg-type]
            assert (await client.negotiate()).startswith(expected.split(":")[0])
            answer = await client.generate(request())
            assert (answer.shared is not None) == (expected == "shm")
            got.append(to_microgroup(answer, keys(2)))
    for other in got[1:]:
        assert all(map(torch.equal, flat(got[0]), flat(other)))
    async with EngineClient(server.url, transport="shm", hosts=["another"]) as client:
        with pytest.raises(ConfigError, match=r'rollout\.transport = "shm": .*read on another; use "msgpack"'):
            await client.negotiate()
    info = httpx.get(f"{server.url}/server_info", trust_env=False).json()["shared_memory"]
    assert info["held"] == 2  # the two that `got` reads yet
    assert info["refused"] == 0


def test_a_plain_client_gets_the_contract(server: EngineServer) -> None:
    body = request().model_dump(mode="json", exclude_none=True)
    response = httpx.post(f"{server.url}/rollout/generate", json=body, trust_env=False, timeout=60)
    assert response.headers["content-type"] == "application/msgpack"
    assert int(response.headers["content-length"]) == len(response.content)
    assert isinstance(msgpack.unpackb(response.content)[0]["dit_trajectory"]["latents"]["data"], bytes)


def owner(pipe: Connection) -> None:
    """An engine's process: grants one block, says how many are held whenever it is asked."""
    pool = BlockPool(2**22)
    sent = share_response(samples(), pool)
    pipe.send(sent)
    while pipe.recv():
        pipe.send(pool.num_held)


def holder(pipe: Connection) -> None:
    """A parser's or trainer's: opens what it is told and keeps it."""
    kept = open_block(pipe.recv())
    pipe.send(int(kept.sum()))
    pipe.recv()


def started(target: Any) -> tuple[Any, Connection]:
    ours, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(target=target, args=(theirs,), daemon=True)
    process.start()
    return process, ours


def maps_of(handle: BlockHandle) -> int:
    """How often this process has the block mapped."""
    number = os.stat(handle.path).st_ino
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(line[4] == str(number) and "/memfd:verst-rollout" in line for line in lines)


def test_a_killed_reader_gives_its_block_back_and_a_killed_engine_leaves_none() -> None:
    engine, to_engine = started(owner)
    body, handle = to_engine.recv()
    reader, to_reader = started(holder)
    to_reader.send(handle)
    assert to_reader.recv() > 0
    to_engine.send(True)
    assert to_engine.recv() == 1
    mine = open_block(handle)
    before = maps_of(handle)
    os.kill(reader.pid, signal.SIGKILL)
    reader.join(10)
    to_engine.send(True)
    assert to_engine.recv() == 1  # we have it yet
    os.kill(engine.pid, signal.SIGKILL)
    engine.join(10)
    assert same(decode_response(Answer(body=body, shared=mine)), samples())  # what is mapped stays
    del mine
    assert (before, blocks._mapped) == (1, {})
    with pytest.raises(EngineError, match="its engine has ended"):
        open_block(handle)


def test_handles_survive_json_as_headers_carry_them() -> None:
    handle = BlockHandle("/proc/1/fd/2", "ab", 3, 4)
    assert BlockHandle(*json.loads(json.dumps(handle))) == handle


def test_rows_at_equal_distances_are_stacked_without_a_copy() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64):
        whole = (torch.randn(4, 5, 6, 3) * 9).to(dtype)
        regular = [whole[i, 1:4].transpose(0, 2) for i in range(4)]
        got = stack_rows(regular)
        assert got.dtype == dtype
        assert torch.equal(got, torch.stack(regular))
        assert got.data_ptr() == regular[0].data_ptr()
        for rows in (
            [whole[0], whole[1], whole[3]],
            [whole[1], whole[0]],
            [whole[0]],
            [whole[0, 0], whole[1, 0].clone()],
        ):
            assert torch.equal(stack_rows(rows), torch.stack(rows))
    rows = [torch.zeros(3), torch.zeros(3, dtype=torch.int32)[:3].float()]
    assert stack_rows(rows).shape == (2, 3)
    held = stack_rows(list(torch.arange(6.0).view(2, 3)))
    assert held.tolist() == [[0, 1, 2], [3, 4, 5]]  # the tensors are gone, their memory is not


def test_a_group_is_conditioned_once(folder: Path) -> None:  # noqa: F811
    pool, worker = BlockPool(2**24), Worker(folder)

    def worker_records(asked: GenerateRequest) -> list[dict[str, Any]]:
        (records,) = worker.generate([resolve(asked, worker.components)])
        assert not isinstance(records, EngineError)
        return records

    made = worker_records(request(seeds=(1, 2), prompt="12"))
    assert [t.shape[0] for t in made[0]["denoising_env"]["pos_cond_kwargs"].values()] == [1, 1]
    microgroup = to_microgroup(shared(pool, made), keys(2))
    for tensor in microgroup.conditioning.positive.values():
        assert len(tensor) == 2
        assert torch.equal(tensor[0], tensor[1])
    first = MicrogroupTask(
        keys=tuple(keys(2)), prompts=("12",) * 2, metadata=({},) * 2, request=request(seeds=(1, 2), prompt="12")
    )
    later = dataclasses.replace(
        first.without_conditioning(), keys=tuple(SampleKey(rollout=0, group=0, index=i) for i in (2, 3))
    )
    other = to_microgroup(encode_response(worker_records(later.request)), later.keys)
    check_echo(later.request, other.echo)
    assert other.conditioning.positive == {}
    scores = Scores(by_reward={"r": (0.0, 1.0)})
    pairs = [(later, other), (first, microgroup)]
    scored = [ScoredMicrogroup(task=task, microgroup=part, scores=scores) for task, part in pairs]
    (group,) = assemble(scored, group_size=4)
    assert [part.conditioning is microgroup.conditioning for part in group.microgroups] == [True, True]


@on_a_loop
async def test_a_held_loop_is_measured() -> None:
    lag = LoopLag(every_s=0.001)
    assert lag.metrics() == {}
    lag.start()
    await asyncio.sleep(0.01)
    time.sleep(0.2)
    await asyncio.sleep(0.01)
    metrics = lag.metrics()
    lag.stop()
    assert metrics["perf/loop_lag_max_s"] > 0.1
    assert 0 < metrics["perf/loop_lag_mean_s"] < metrics["perf/loop_lag_max_s"]


def test_what_is_mapped_can_be_handed_on_after_its_engine_has_ended() -> None:
    pool = BlockPool(2**20)
    block = pool.take(4096)
    assert block is not None
    block.data[:4] = torch.arange(4, dtype=torch.uint8)
    granted = pool.grant(block, 4096)
    tensor = open_block(granted)[:4]
    pool.close()
    handle = handle_of(tensor)
    assert handle is not None
    assert handle.block.path != granted.path
    with open(handle.block.path, "rb") as file:
        file.seek(blocks.HEADER_BYTES)
        assert file.read(4) == bytes(range(4))
    path, tensor = handle.block.path, None
    gc.collect()
    assert not os.path.exists(path)  # nor is a file left open
