"""The engine over HTTP: what is refused and how, weights in, memory out, a queue that stays bounded."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
from engine_fixtures import HeldServer, HeldWorker, folder, keys, raw, request  # noqa: F401
from loop_fixtures import on_a_loop
from starlette.requests import Request

from verst.engine.app import _failed
from verst.engine.batching import Batcher, Expired, OtherWeights
from verst.engine.client import EngineClient
from verst.engine.server import EngineServer
from verst.engine.wire import decode_response, to_microgroup
from verst.engine.worker import Worker
from verst.errors import (
    ConfigError,
    EchoError,
    EngineError,
    InvariantError,
    ModelError,
    RequestError,
    SyncError,
    VerstError,
)
from verst.families.tiny import build_tiny
from verst.web.guard import new_token
from verst.web.terms import Terms
from verst.web.timing import ServerTimes
from verst.weights.send import Outgoing, trained_tensors
from verst.weights.transports import ShmSender


@pytest.fixture
def server(folder: Path) -> Iterator[EngineServer]:  # noqa: F811
    server = EngineServer(folder, files=None)
    server.start()
    server.wait_ready(60)
    yield server
    server.stop()


@pytest.fixture
def http(server: EngineServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        yield client


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def post(http: httpx.Client, path: str, body: Any, status: int = 200) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"guidance": 4.0}, 422, "did you mean 'guidance_scale'?"),
        ({"height": 40}, 400, "nearest that is: 32"),
        ({"prompt": "1 " * 40}, 400, "tokens for tokenizer"),
        ({"seeds": None}, 400, "seed is missing"),
        ({"rollout_sde_type": "euler"}, 400, "rollout_sde_type"),
    ],
    ids=str,
)
def test_refusals_over_http(http: httpx.Client, changes: dict[str, Any], status: int, message: str) -> None:
    assert message in post(http, "/rollout/generate", raw(**changes), status)["detail"]
    assert http.get("/health").status_code == 200


def test_a_body_that_is_not_json(http: httpx.Client) -> None:
    assert http.post("/rollout/generate", content=b"{").status_code == 422


def test_a_request_and_what_the_server_says_of_itself(server: EngineServer, http: httpx.Client) -> None:
    response = http.post("/rollout/generate", json=raw(key=[3, 4], guidance_scale=0))
    assert response.headers["content-type"] == "application/msgpack"
    microgroup = to_microgroup(response.content, keys(2))
    assert microgroup.echo["key"] == [3, 4]
    assert microgroup.echo["guidance_scale"] == 0
    assert ServerTimes.of(response.headers["server-timing"]) is not None
    info = http.get("/server_info").json()
    assert (info["samples"], info["batches"], info["weight_version"], info["state"]) == (2, 1, -1, "ready")
    assert info["prompt_cache"]["misses"] == 1
    model = http.get("/model_info").json()
    assert (model["model_type"], model["architectures"]) == ("diffusion", ["SD3Transformer2DModel"])
    assert http.get("/liveness").json() == http.get("/liveness").json() == {"status": "ok"}
    assert http.get("/health_generate").status_code == 200


def test_prompts_are_checked_before_a_run(http: httpx.Client) -> None:
    problems = post(
        http, "/rollout/check_prompts", {"prompts": ["12", "1 " * 40, "1 " * 20], "max_sequence_length": 16}
    )
    limits = [line.rsplit(" ", 1)[1] for line in problems]
    assert sorted(limits) == ["16", "16"]  # of T5; CLIP takes 77
    assert post(http, "/rollout/check_prompts", {"prompts": ["12"]}) == []


def test_requests_are_checked_before_a_run(http: httpx.Client) -> None:
    good, odd = raw(), raw(height=33)
    long = raw(prompt="1 " * 40, max_sequence_length=16)
    problems = post(http, "/rollout/check_requests", {"requests": [good, odd, long, raw(image_path=["absent.png"])]})
    assert problems[0] is None
    assert "height = 33" in problems[1]
    assert "nearest that is: 32" in problems[1]
    assert "max_sequence_length" in problems[2]
    assert "makes media from text alone" in problems[3]  # counted, not read
    assert http.get("/server_info").json()["waiting"] == 0


def test_a_port_in_use_is_named(server: EngineServer, folder: Path) -> None:  # noqa: F811
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=rf"engine\.port = {port} is in use on 127\.0\.0\.1: choose another"):
        EngineServer(folder, port=port).start()
    with pytest.raises(ConfigError, match=r"engine\.host"):
        EngineServer(folder, host="no.such.host.invalid").start()


def test_the_port_is_free_after_stop(folder: Path) -> None:  # noqa: F811
    server = EngineServer(folder)
    server.start()
    port = int(server.url.rsplit(":", 1)[1])
    server.wait_ready(60)
    server.stop()
    server.stop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))


def test_health_while_loading_and_after_a_failed_load(tmp_path: Path) -> None:
    class Slow(EngineServer):
        def _load(self) -> Worker:
            until(lambda: (tmp_path / "go").exists())
            return super()._load()

    server = Slow(tmp_path / "nothing")
    server.start()
    try:
        with httpx.Client(base_url=server.url, trust_env=False) as http:
            assert http.get("/liveness").status_code == 200
            assert http.get("/health").status_code == 503
            assert "loading" in post(http, "/rollout/generate", raw(), 503)["detail"]
            (tmp_path / "go").touch()
            with pytest.raises(EngineError, match=r"could not start.*model_index\.json does not exist"):
                server.wait_ready(60)
            health = http.get("/health")
            assert health.status_code == 503
            assert "model_index.json" in health.json()["detail"]
            assert "dead" in post(http, "/rollout/generate", raw(), 500)["detail"]
    finally:
        server.stop()


def test_serving_a_folder_that_cannot_be_loaded_ends(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model_index\.json does not exist"):
        EngineServer(tmp_path / "nothing").serve_forever()
    broken = build_tiny("sd3", tmp_path / "broken")
    for weights in (broken / "transformer").glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(EngineError, match=r"the engine ended: "):
        EngineServer(broken).serve_forever()


def transformer_of(folder: Path) -> dict[str, torch.Tensor]:  # noqa: F811
    return safetensors.torch.load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def test_weights_from_disk(http: httpx.Client, tmp_path: Path) -> None:
    other = build_tiny("sd3", tmp_path / "other", seed=1)
    before = post(http, "/get_weights_checksum", {})
    answer = post(http, "/update_weights_from_disk", {"model_path": str(other)})
    assert answer["success"]
    assert answer["weight_version"] == 0
    after = post(http, "/get_weights_checksum", {})
    assert {name for name in before if before[name] != after[name]} == {"transformer"}
    sha = hashlib.sha256()
    for name, tensor in sorted(transformer_of(other).items()):
        sha.update(name.encode())
        sha.update(tensor.numpy().tobytes())
    assert after["transformer"] == sha.hexdigest()
    microgroup = to_microgroup(http.post("/rollout/generate", json=raw()).content, keys(2))
    assert {sample.weight_version for sample in microgroup.samples} == {0}
    body = {"model_path": str(other), "target_modules": ["transformer", "text_encoder_3", "vae"], "weight_version": 9}
    assert post(http, "/update_weights_from_disk", body)["weight_version"] == 9
    assert post(http, "/get_weights_checksum", {"module_names": ["vae", "x"]})["x"] == "not_found"


def _rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.proj_out.weight"] = tensors.pop("proj_out.weight")


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["proj_out.weight"]


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["proj_out.weight"] = tensors["proj_out.weight"][:-1].clone()


def _poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["proj_out.weight"][0, 0] = float("inf")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_rename, "no tensors model.proj_out.weight"),
        (_drop, "missing: proj_out.weight"),
        (_reshape, "proj_out.weight is"),
        (_poison, "not finite"),
    ],
)
def test_wrong_weights_on_disk_change_nothing(
    http: httpx.Client,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    spoil: Callable[[dict[str, torch.Tensor]], None],
    message: str,
) -> None:
    shutil.copytree(folder / "transformer", tmp_path / "transformer")
    shutil.copytree(build_tiny("sd3", tmp_path / "other", seed=1) / "vae", tmp_path / "vae")
    tensors = transformer_of(folder)
    spoil(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    before = post(http, "/get_weights_checksum", {})
    # The good module comes first: it must not be written before the bad one is known.
    body = {"model_path": str(tmp_path), "target_modules": ["vae", "transformer"]}
    answer = post(http, "/update_weights_from_disk", body, 400)
    assert not answer["success"]
    assert message in answer["message"]
    assert post(http, "/get_weights_checksum", {}) == before
    assert http.get("/server_info").json()["weight_version"] == -1


def test_a_folder_without_the_module(http: httpx.Client, tmp_path: Path) -> None:
    answer = post(http, "/update_weights_from_disk", {"model_path": str(tmp_path)}, 400)
    assert "holds no *.safetensors" in answer["message"]
    body = {"model_path": str(tmp_path), "target_modules": ["unet"]}
    assert post(http, "/update_weights_from_disk", body, 400)["success"] is False


def test_tensors_in_the_request(http: httpx.Client, folder: Path) -> None:  # noqa: F811
    weight = transformer_of(folder)["proj_out.weight"] + 1
    payload = base64.b64encode(safetensors.torch.save({"proj_out.weight": weight})).decode()
    body = {"serialized_named_tensors": [payload], "load_format": "safetensors"}
    assert post(http, "/update_weights_from_tensor", body)["weight_version"] == 0
    sha = hashlib.sha256(b"torch.float32" + repr(tuple(weight.shape)).encode() + weight.numpy().tobytes()).hexdigest()
    check = {"target_module": "transformer", "expected_named_tensors_sha256": {"proj_out.weight": sha}}
    assert post(http, "/update_weights_from_tensor_checker", check)["success"]
    check["expected_named_tensors_sha256"] = {"proj_out.weight": "0", "nobody": sha}
    answer = post(http, "/update_weights_from_tensor_checker", check, 400)
    assert (answer["missing"], answer["mismatched"]) == (["nobody"], ["proj_out.weight"])
    before = post(http, "/get_weights_checksum", {})
    for load_format in (None, "flattened_bucket"):
        body["load_format"] = load_format
        assert "pickle" in post(http, "/update_weights_from_tensor", body, 400)["message"]
    unknown = base64.b64encode(safetensors.torch.save({"nobody": weight + 1, "proj_out.weight": weight})).decode()
    for wrong in (unknown, "AAAA", "***"):
        wrong_body = {"serialized_named_tensors": [wrong], "load_format": "safetensors"}
        assert not post(http, "/update_weights_from_tensor", wrong_body, 400)["success"]
    assert post(http, "/get_weights_checksum", {}) == before


def test_weights_from_shared_memory_through_the_client(server: EngineServer, folder: Path) -> None:  # noqa: F811
    named = {n: p + 0.01 for n, p in Worker(folder).components.transformer.named_parameters()}
    tensors = trained_tensors(named, dtype=torch.float32)

    async def scenario() -> None:
        async with EngineClient(server.url) as client:
            before = await client.checksum(["transformer"])
            sender, spoiler = (ShmSender(rank=0, bucket_bytes=2**18) for _ in range(2))
            dtypes = dict.fromkeys(tensors, torch.float32)
            good = sender.publish(Outgoing(version=5, tensors=tensors, dtypes=dtypes, lora=None))
            assert good is not None
            certificate = await client.update_weights(good)
            assert (certificate["version"], certificate["num_applied"]) == (5, len(tensors))
            changed = await client.checksum(["transformer"])
            assert changed != before
            microgroup = to_microgroup(await client.generate(request()), keys(2))
            assert microgroup.echo["weight_version"] == 5
            with pytest.raises(SyncError, match="digest"):
                await client.update_weights({**good, "digest": "multilinear:0"})
            with pytest.raises(EngineError, match=r"weights are not whole: version 5 arrived damaged; send them again"):
                await client.generate(request())
            await client.update_weights(good)
            await client.generate(request())
            renamed = {("x." + n if n == "proj_out.bias" else n): t for n, t in tensors.items()}
            dtypes = dict.fromkeys(renamed, torch.float32)
            bad = spoiler.publish(Outgoing(version=6, tensors=renamed, dtypes=dtypes, lora=None))
            assert bad is not None
            with pytest.raises(SyncError, match=r"x\.proj_out\.bias"):
                await client.update_weights(bad)
            sender.close()
            spoiler.close()
            with pytest.raises(SyncError, match="cannot be opened"):
                await client.update_weights(good)
            assert await client.checksum(["transformer"]) == changed

    asyncio.run(scenario())


def test_released_memory_answers_503_until_resumed(http: httpx.Client) -> None:
    before = http.post("/rollout/generate", json=raw()).content
    assert post(http, "/release_memory_occupation", None)["sleeping"] is True
    refused = http.post("/rollout/generate", json=raw())
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert http.get("/health").json()["state"] == "asleep"
    assert post(http, "/resume_memory_occupation", None)["sleeping"] is False
    after = http.post("/rollout/generate", json=raw()).content
    one, two = (to_microgroup(payload, keys(2)).samples[0] for payload in (before, after))
    assert torch.equal(one.media, two.media)


def test_weights_given_up_while_asleep_can_come_back_from_disk(http: httpx.Client, folder: Path) -> None:  # noqa: F811
    body = {"model_path": str(folder), "target_modules": ["transformer"]}
    post(http, "/update_weights_from_disk", body)
    before = http.post("/rollout/generate", json=raw()).content
    assert "keep" in post(http, "/release_memory_occupation", {"keep": "nothing"}, 400)["message"]
    assert post(http, "/release_memory_occupation", {"keep": "others"})["sleeping"] is True
    assert "resume it before" in post(http, "/update_weights_from_disk", body, 400)["message"]
    post(http, "/resume_memory_occupation", None)
    assert "given up while the engine slept" in post(http, "/rollout/generate", raw(), 500)["detail"]
    post(http, "/update_weights_from_disk", body)
    after = http.post("/rollout/generate", json=raw()).content
    one, two = (to_microgroup(payload, keys(2)).samples[0] for payload in (before, after))
    assert torch.equal(one.media, two.media)


async def running(batcher: Batcher) -> asyncio.Task[None]:
    task = asyncio.create_task(batcher.run())
    while batcher.state == "loading":
        await asyncio.sleep(0.002)
    return task


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def waiting(batcher: Batcher, number: int) -> None:
    async with asyncio.timeout(10):
        while batcher.num_waiting != number:
            await asyncio.sleep(0.002)


def held(folder: Path, **changes: Any) -> tuple[Batcher, list[HeldWorker]]:  # noqa: F811
    workers: list[HeldWorker] = []

    def make() -> Worker:
        workers.append(HeldWorker(folder))
        return workers[0]

    limits: dict[str, Any] = {"deterministic": False, "max_batch": 4, "queue_size": 8, "request_timeout_s": 20.0}
    return Batcher(make, **{**limits, **changes}), workers


def test_equal_requests_are_joined_up_to_the_batch_and_never_over_an_update(folder: Path) -> None:  # noqa: F811
    async def scenario() -> None:
        batcher, workers = held(folder)
        task = await running(batcher)
        jobs = [asyncio.create_task(batcher.generate(request(seeds=(1,))))]
        await asyncio.to_thread(workers[0].begun.wait, 10)
        for seeds, steps in (((2,), 4), ((3,), 3), ((4, 5), 4), ((6, 7), 4), ((8,), 4)):
            jobs.append(asyncio.create_task(batcher.generate(request(seeds=seeds, num_inference_steps=steps))))
        await waiting(batcher, 5)
        update = asyncio.create_task(batcher.control(lambda worker: setattr(worker, "weight_version", 7)))
        await asyncio.sleep(0.01)
        jobs.append(asyncio.create_task(batcher.generate(request(seeds=(9,)))))
        await waiting(batcher, 6)
        workers[0].go.set()
        payloads = await asyncio.gather(*jobs)
        await update
        assert workers[0].batches == [[(1,)], [(2,), (4, 5), (8,)], [(3,)], [(6, 7)], [(9,)]]
        versions = [to_microgroup(p, keys(len(s))).echo for p, s in zip(payloads, map(_seeds, payloads), strict=True)]
        assert [echo["weight_version"] for echo in versions] == [-1] * 6 + [7]
        await ended(task)

    asyncio.run(scenario())


def _seeds(payload: bytes) -> list[int]:
    return decode_response(payload)[0]["echo"]["seeds"]


def test_deterministic_requests_are_batches_of_their_own(folder: Path) -> None:  # noqa: F811
    async def scenario() -> None:
        batcher, workers = held(folder, deterministic=True)
        task = await running(batcher)
        jobs = [asyncio.create_task(batcher.generate(request(seeds=(i,)))) for i in range(3)]
        await waiting(batcher, 2)
        workers[0].go.set()
        await asyncio.gather(*jobs)
        assert workers[0].batches == [[(0,)], [(1,)], [(2,)]]
        await ended(task)

    asyncio.run(scenario())


def test_cancelled_requests_leave_the_queue_and_stop_their_batch(folder: Path) -> None:  # noqa: F811
    async def scenario() -> None:
        batcher, workers = held(folder)
        task = await running(batcher)
        first = asyncio.create_task(batcher.generate(request(seeds=(1,))))
        await asyncio.to_thread(workers[0].begun.wait, 10)
        second = asyncio.create_task(batcher.generate(request(seeds=(2,))))
        await waiting(batcher, 1)
        second.cancel()
        await waiting(batcher, 0)
        first.cancel()
        await asyncio.wait({first, second})
        workers[0].go.set()
        third = await batcher.generate(request(seeds=(3,)))
        assert _seeds(third) == [3]
        assert workers[0].batches == [[(1,)], [(3,)]]
        assert workers[0].num_samples == 1  # the first batch ended before its first step
        await ended(task)

    asyncio.run(scenario())


def test_a_request_has_a_deadline_waiting_included(folder: Path) -> None:  # noqa: F811
    async def scenario() -> None:
        batcher, workers = held(folder, request_timeout_s=4.0)
        task = await running(batcher)
        with pytest.raises(Expired, match=r"in 4 s"):
            await batcher.generate(request())
        assert batcher.num_waiting == 0
        workers[0].go.set()
        assert await batcher.generate(request())
        await ended(task)

    asyncio.run(scenario())


def test_a_failed_batch_is_its_requests_failure_alone(folder: Path) -> None:  # noqa: F811
    class Clumsy(Worker):
        def generate(self, jobs: Any, **options: Any) -> Any:
            if jobs[0].prompts[0] == "13":
                raise ZeroDivisionError("by accident")
            return super().generate(jobs, **options)

    async def scenario() -> None:
        batcher = Batcher(
            lambda: Clumsy(folder), deterministic=False, max_batch=4, queue_size=4, request_timeout_s=20.0
        )
        task = await running(batcher)
        with pytest.raises(ZeroDivisionError):
            await batcher.generate(request(prompt="13"))
        assert batcher.state == "ready"
        assert await batcher.generate(request())
        await ended(task)
        with pytest.raises(EngineError, match="dead"):
            await batcher.generate(request())

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", [SystemExit("the thread is gone"), RuntimeError("CUDA error")], ids=repr)
def test_a_dead_worker_ends_the_engine_and_every_waiting_request(folder: Path, fault: BaseException) -> None:  # noqa: F811
    class Dying(HeldWorker):
        def generate(self, jobs: Any, **options: Any) -> Any:
            self.begun.set()
            assert self.go.wait(20)
            raise fault

        def probe(self) -> None:
            raise RuntimeError("CUDA error: still")

    async def scenario() -> None:
        workers: list[Dying] = []
        batcher = Batcher(
            lambda: workers.append(Dying(folder)) or workers[0],  # type: ignore[func-returns-value]
            deterministic=True,
            max_batch=4,
            queue_size=4,
            request_timeout_s=20.0,
        )
        task = await running(batcher)
        jobs = [asyncio.create_task(batcher.generate(request(seeds=(i,)))) for i in range(3)]
        await waiting(batcher, 2)
        workers[0].go.set()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(result, EngineError | RuntimeError) for result in results)
        assert batcher.state == "failed"
        with pytest.raises(EngineError):
            await task

    asyncio.run(scenario())


def test_the_terms_of_a_request_hold_when_its_batch_begins(folder: Path) -> None:  # noqa: F811
    async def scenario() -> None:
        batcher, workers = held(folder, max_batch=8)
        task = await running(batcher)
        begun = asyncio.create_task(batcher.generate(request(seeds=(1,))))
        await asyncio.to_thread(workers[0].begun.wait, 10)
        update = asyncio.create_task(batcher.control(lambda worker: setattr(worker, "weight_version", 7)))
        await asyncio.sleep(0.01)
        jobs = [
            asyncio.create_task(batcher.generate(request(seeds=(seed,)), terms=terms))
            for seed, terms in enumerate(
                (Terms(), Terms(version=-1), Terms(version=7), Terms(min_version=8), Terms(min_version=6)), start=2
            )
        ]
        late = asyncio.create_task(batcher.generate(request(seeds=(9,)), terms=Terms(timeout_s=0.05)))
        with pytest.raises(Expired, match=r"not done in 0\.05 s"):
            await late
        workers[0].go.set()
        await asyncio.gather(begun, update)
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        assert workers[0].batches == [[(1,)], [(2,), (4,), (6,)]]
        for index, message in ((1, "weights of version 7, the request wants weights of version -1"), (3, "8 or newer")):
            assert isinstance(outcomes[index], OtherWeights)
            assert message in str(outcomes[index])
        await ended(task)

    asyncio.run(scenario())


def test_the_answer_says_what_made_it_and_other_weights_are_refused(
    server: EngineServer,
    http: httpx.Client,
) -> None:
    made = http.post("/rollout/generate", json=raw(), headers={"verst-weight-version": "-1"})
    assert (made.status_code, made.headers["verst-weight-version"]) == (200, "-1")
    refused = http.post("/rollout/generate", json=raw(), headers={"verst-min-weight-version": "0"})
    assert refused.status_code == 409
    assert http.post("/rollout/generate", json=raw(), headers={"verst-timeout-s": "soon"}).status_code == 400

    async def ask() -> None:
        async with EngineClient(server.url) as client:
            with pytest.raises(EchoError, match="weights of version -1, the request wants weights of version 3"):
                await client.generate(request(), weight_version=3)

    asyncio.run(ask())


def test_a_server_that_others_can_reach_wants_a_token(folder: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=r"engine\.host = '0\.0\.0\.0' can be reached"):
        EngineServer(folder, host="0.0.0.0")
    token = new_token()
    server = EngineServer(folder, token=token)
    server.start()
    try:
        server.wait_ready(60)

        async def ask() -> None:
            async with EngineClient(server.url, token=token) as client, EngineClient(server.url) as stranger:
                assert await client.health()
                assert not await stranger.health()
                with pytest.raises(RequestError, match="Authorization: Bearer"):
                    await stranger.generate(request())
                assert await client.negotiate() == "msgpack (rollout.transport)"

        asyncio.run(ask())
    finally:
        server.stop()


def test_a_full_queue_and_a_client_that_goes_away(folder: Path) -> None:  # noqa: F811
    server = HeldServer(folder, queue_size=1)
    server.start()
    server.wait_ready(60)

    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=20) as http:
            first = asyncio.create_task(http.post("/rollout/generate", json=raw(seeds=[1])))
            await asyncio.to_thread(server.worker.begun.wait, 10)
            second = asyncio.create_task(http.post("/rollout/generate", json=raw(seeds=[2])))
            while (await http.get("/server_info")).json()["waiting"] != 1:
                await asyncio.sleep(0.01)
            full = await http.post("/rollout/generate", json=raw(seeds=[3]))
            assert full.status_code == 503
            assert full.headers["retry-after"] == "1"
            assert "queue_size" in full.json()["detail"]
            second.cancel()  # closes its connection
            while (await http.get("/server_info")).json()["waiting"] != 0:
                await asyncio.sleep(0.01)
            third = asyncio.create_task(http.post("/rollout/generate", json=raw(seeds=[4])))
            server.worker.go.set()
            assert (await first).status_code == (await third).status_code == 200
        assert server.worker.batches == [[(1,)], [(4,)]]

    try:
        asyncio.run(asyncio.wait_for(scenario(), 30))
    finally:
        server.worker.go.set()
        server.stop()


def test_the_client_waits_for_room_and_passes_refusals_on(folder: Path) -> None:  # noqa: F811
    server = HeldServer(folder, queue_size=1)
    server.start()
    server.wait_ready(60)
    server.worker.go.set()

    async def scenario() -> None:
        async with EngineClient(server.url) as client:
            payloads = await asyncio.gather(*(client.generate(request(seeds=(i,))) for i in range(6)))
            assert [_seeds(p) for p in payloads] == [[i] for i in range(6)]
            with pytest.raises(RequestError, match="nearest that is: 32"):
                await client.generate(request(height=40))
            assert await client.health()
            await client.release_memory()
        async with EngineClient(server.url, busy_s=0.2) as client:
            with pytest.raises(EngineError, match=r"not available.*resume"):
                await client.generate(request())
            await client.resume_memory()
            assert await client.generate(request())

    try:
        asyncio.run(scenario())
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("no such way"), 400), (EngineError("out of memory"), 500), (InvariantError("two versions"), 500)],
)
@on_a_loop
async def test_every_error_of_ours_is_an_answer(error: VerstError, status: int) -> None:
    answer = await _failed(Request({"type": "http"}), error)
    assert (answer.status_code, json.loads(bytes(answer.body))["detail"]) == (status, str(error))
