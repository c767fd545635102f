"""Requests that are wrong in every way we could think of, and in some that a machine thinks of: a clear 4xx each, and the
server goes on."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from engine_fixtures import folder, keys, raw  # noqa: F401
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from router_fixtures import FakeEngine

from verst.engine.request import GenerateRequest
from verst.engine.server import EngineServer
from verst.engine.wire import to_microgroup
from verst.router.app import Router
from verst.router.options import RouterOptions
from verst.web.listen import listen, url_of

OPTIONAL_BODY = ("/get_weights_checksum", "/release_memory_occupation", "/resume_memory_occupation")
BODIES = {
    "nothing": b"",
    "half": b'{"prompt": ',
    "text": b"a cat",
    "list": b"[1, 2]",
    "null": b"null",
    "number": b"17",
    "no utf-8": b'{"prompt": "\xff\xfe"}',
    "msgpack": b"\x81\xa6prompt\xa3cat",
    "deep": b"[" * 100_000,
    "deep record": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "form": b"prompt=cat&seed=1",
    "unknown": b'{"no_such_field": 1}',
}
ENGINE_PATHS = (
    "/rollout/generate",
    "/rollout/check_prompts",
    "/rollout/check_requests",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_tensor_checker",
    "/update_weights_from_manifest",
    "/get_weights_checksum",
    "/release_memory_occupation",
)
ROUTER_PATHS = (*ENGINE_PATHS[:4], ENGINE_PATHS[6], "/engines")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[httpx.Client]:  # noqa: F811
    server = EngineServer(folder, threads=1)
    server.start()
    server.wait_ready(60)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        yield client
        # What came before left it as it was: it makes samples still.
        made = to_microgroup(client.post("/rollout/generate", json=raw()).content, keys(2))
        assert made.echo["weight_version"] == -1
    server.stop()


@pytest.fixture(scope="module")
def router() -> Iterator[httpx.Client]:
    """Before an engine that refuses nothing, so that what is refused is the router's doing."""
    socks = [listen("127.0.0.1", 0, keys="{}") for _ in range(2)]
    routing = Router(RouterOptions(engines=(url_of(socks[0]),), probe_s=0.05))
    servers = [uvicorn.Server(uvicorn.Config(app, log_level="critical")) for app in (FakeEngine().app, routing.app)]
    threads = [
        threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        for server, sock in zip(servers, socks, strict=True)
    ]
    for thread in threads:
        thread.start()
    with httpx.Client(base_url=url_of(socks[1]), trust_env=False, timeout=30) as client:
        while client.get("/health").status_code != 200:
            time.sleep(0.02)
        yield client
        assert client.post("/rollout/generate", json={}).content == b"an answer"
    for server, thread in zip(servers, threads, strict=True):
        server.should_exit = True
        thread.join()


def short(value: Any) -> str:
    return str(value)[:50]


def refused(response: httpx.Response) -> str:
    """The reason that a refusal gives."""
    assert 400 <= response.status_code < 500, f"{response.status_code}: {response.text[:300]}"
    reason = response.json()["detail"]
    assert isinstance(reason, str)
    assert len(reason) > 10
    return reason


@pytest.mark.parametrize("path", ENGINE_PATHS)
def test_bodies_that_are_no_request_of_an_engine(engine: httpx.Client, path: str) -> None:
    for name, body in BODIES.items():
        if name == "nothing" and path in OPTIONAL_BODY:
            continue
        refused(engine.post(path, content=body))
    assert engine.get("/health").status_code == 200


@pytest.mark.parametrize("path", ROUTER_PATHS)
def test_bodies_that_are_no_request_of_a_router(router: httpx.Client, path: str) -> None:
    for name, body in BODIES.items():
        if name == "unknown" and path != "/engines":
            continue  # the engine's to judge
        refused(router.post(path, content=body))
    assert router.get("/health").status_code == 200


WRONG = ({"a": 1}, [[1]], "\u0000 no", -1, 1e400, True)
"""Values of which each is wrong for most fields."""
RIGHT: dict[str, tuple[Any, ...]] = {
    "prompt": ("\u0000 no",),
    "negative_prompt": ("\u0000 no",),
    "rollout": (True,),
    "rollout_log_prob_no_const": (True,),
    "rollout_debug_mode": (True,),
    "rollout_return_denoising_env": (True,),
    "rollout_return_dit_trajectory": (True,),
    "suppress_logs": (True,),
    "rollout_share_prefix": (True,),
    "share_denoising_env": (True,),
    "return_media": (True,),
}
"""Field -> those that are not."""


@pytest.mark.parametrize("name", sorted(GenerateRequest.model_fields))
def test_values_that_a_field_does_not_take(engine: httpx.Client, name: str) -> None:
    for value in WRONG:
        if any(value is right or value == right for right in RIGHT.get(name, ()) if type(value) is type(right)):
            continue
        # Python's json writes 1e400 as Infinity, which pydantic reads as a number and then refuses.
        body = json.dumps({**raw(), "prompts": None, name: value})
        reason = refused(engine.post("/rollout/generate", content=body.encode()))
        # Some are wrong only together with another field.
        assert name.removesuffix("s") in reason or "prompt" in reason or "num_" in reason, reason
    assert engine.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seeds": [2**63]}, "seeds"),
        ({"seeds": []}, "seeds"),
        ({"seeds": None, "seed": 2**63 - 1, "num_outputs_per_prompt": 2}, "2^63"),
        ({"height": 10**9, "width": 10**9}, "height"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"rollout_sde_step_indices": [4]}, "rollout_sde_step_indices"),
        ({"rollout_sde_step_indices": [1, 0]}, "ascending"),
        ({"rollout_return_step_indices": [9]}, "rollout_return_step_indices"),
        ({"extra_sampling_params": {"no_such": 1}}, "no_such"),
        ({"extra_sampling_params": {"extra_sampling_params": {}}}, "extra_sampling_params"),
        ({"extra_sampling_params": {"seed": "x"}}, "extra_sampling_params"),
        ({"image_path": ["/etc/passwd"]}, "image_path: /etc/passwd lies in no folder"),
        ({"image_path": ["../../../etc/passwd"]}, "image_path"),
        ({"image_path": ["\u0000"]}, "image_path"),
        (
            {"extra_sampling_params": {"image_path": ["/proc/self/environ"]}},
            "image_path: /proc/self/environ lies in no",
        ),
        ({"num_frames": 5}, "num_frames"),
        ({"max_sequence_length": 10**9}, "max_sequence_length"),
        ({"prompt": "x" * 10**4}, "tokens"),
        ({"prompt": "x" * 10**6}, "prompt"),
        ({"height": 2**14, "width": 2**14, "seeds": list(range(17))}, "17 samples of height x width x num_frames"),
        ({"seeds": list(range(5000))}, "seeds"),
        ({"seeds": None, "seed": 1, "num_outputs_per_prompt": 5000}, "num_outputs_per_prompt"),
        ({"key": [1, 2, 3]}, "key"),
        ({"media_format": "jpeg"}, "media_format"),
    ],
    ids=short,
)
def test_requests_that_cannot_be_carried_out(engine: httpx.Client, changes: dict[str, Any], names: str) -> None:
    assert names in refused(engine.post("/rollout/generate", json=raw(**changes)))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *itertools.product(["GET", "PUT", "DELETE"], ENGINE_PATHS[:3], [405]),
        *itertools.product(["POST"], ["/health", "/server_info"], [405]),
        *itertools.product(["GET", "POST"], ["/", "/no/such", "/../etc/passwd", "/rollout/generate/", "/%00"], [404]),
    ],
    ids=short,
)
def test_ways_that_lead_nowhere(
    engine: httpx.Client, router: httpx.Client, method: str, path: str, status: int
) -> None:
    for client in (engine, router):
        assert client.request(method, path, content=b"{}").status_code in (status, 307)


MANIFEST: dict[str, Any] = {
    "version": 1,
    "finetune": {"type": "full"},
    "transport": "shm",
    "endpoint": {},
    "buckets": [{"handle": "", "nbytes": 4, "tensors": [{"name": "w", "dtype": "float32", "shape": [1], "offset": 0}]}],
    "digest": "multilinear:0",
}


def bucket(**changes: Any) -> dict[str, Any]:
    return {"buckets": [{**MANIFEST["buckets"][0], **changes}]}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "one"},
        {"version": None},
        {"finetune": {}},
        {"finetune": {"type": "none"}},
        {"finetune": {"type": "lora"}},
        {"finetune": {"type": "lora", "form": "pairs", "rank": "x", "alpha": [], "targets": 1}},
        {"finetune": "full"},
        {"transport": "pigeon"},
        {"transport": 7},
        {"transport": "collective"},
        {"transport": "collective", "endpoint": {"host": 1, "port": "x"}},
        {"transport": "cuda_ipc", "endpoint": {"handle": "x"}},
        {"transport": "disk"},
        {"transport": "disk", **bucket(handle="/etc/passwd")},
        {"endpoint": []},
        {"buckets": {}},
        {"buckets": [1]},
        bucket(handle=7),
        bucket(handle="/etc/passwd"),
        bucket(handle="/proc/1/mem"),
        bucket(handle=f"/proc/{os.getpid()}/fd/0"),
        bucket(handle="/proc/self/fd/../environ"),
        bucket(nbytes=-1),
        bucket(nbytes=2**62),
        bucket(tensors="all"),
        bucket(tensors=[{"name": "w"}]),
        bucket(tensors=[{"name": "w", "dtype": "float32", "shape": [-1], "offset": 0}]),
        bucket(tensors=[{"name": "w", "dtype": "quaternion", "shape": [1], "offset": 0}]),
        {"digest": 1},
        {"digest": "md5:0"},
    ],
    ids=short,
)
def test_manifests_of_nothing(engine: httpx.Client, changes: dict[str, Any]) -> None:
    refused(engine.post("/update_weights_from_manifest", json={**MANIFEST, **changes}))
    info = engine.get("/server_info").json()
    assert (info["weight_version"], info["invalid_weights"]) == (-1, None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_disk", {"model_path": "/etc"}),
        ("/update_weights_from_disk", {"model_path": "relative/../../etc"}),
        ("/update_weights_from_disk", {"model_path": "\u0000"}),
        ("/update_weights_from_disk", {"model_path": 1}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["x"]}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["%%"], "load_format": "safetensors"}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["eHh4"], "load_format": "safetensors"}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [], "load_format": "pickle"}),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [], "load_format": "safetensors", "target_modules": ["a", "b"]},
        ),
        ("/update_weights_from_tensor_checker", {"target_module": "none", "expected_named_tensors_sha256": {}}),
        (
            "/update_weights_from_tensor_checker",
            {"target_module": "transformer", "expected_named_tensors_sha256": {"w": "0"}},
        ),
        ("/get_weights_checksum", {"module_names": "all"}),
        ("/release_memory_occupation", {"keep": "some"}),
        ("/rollout/check_prompts", {"prompts": "one"}),
        ("/rollout/check_prompts", {"prompts": ["1"], "max_sequence_length": "long"}),
        ("/rollout/check_requests", {"requests": [{}]}),
    ],
    ids=short,
)
def test_weights_and_questions_that_make_no_sense(engine: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = engine.post(path, json=body)
    assert 400 <= response.status_code < 500, response.text
    assert len(response.json()["message"]) > 5


@pytest.mark.parametrize("name", ["verst-weight-version", "verst-min-weight-version", "verst-timeout-s"])
def test_terms_that_are_none(engine: httpx.Client, router: httpx.Client, name: str) -> None:
    for client, value in itertools.product((engine, router), ("x", "", "1e999", "nan", "0x10", "--1")):
        assert name in refused(client.post("/rollout/generate", json=raw(), headers={name: value}))


scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(name=st.sampled_from(sorted(GenerateRequest.model_fields)), value=values)
@example(name="seeds", value=[2**63 - 1])
@example(name="prompt", value="\ud800")
def test_any_value_in_any_field_leaves_the_engine_alive(engine: httpx.Client, name: str, value: Any) -> None:
    # Fields whose larger values are right, and would be carried out.
    if name in ("num_outputs_per_prompt", "num_inference_steps", "height", "width", "num_frames"):
        value = value if not isinstance(value, int | float) else -abs(value)
    body = json.dumps({**raw(num_inference_steps=1), name: value}).encode()
    response = engine.post("/rollout/generate", content=body)
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        refused(response)


@quick
@given(path=st.sampled_from([*ENGINE_PATHS[1:8]]), body=values | st.binary(max_size=64))
def test_any_body_leaves_the_engine_alive(engine: httpx.Client, path: str, body: Any) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = engine.post(path, content=content)
    assert response.status_code < 500, response.text
    assert "invalid_weights" in engine.get("/server_info").json()


@quick
@given(body=st.binary(max_size=64) | values, accept=st.binary(max_size=20))
@example(body=b"{}", accept=b"\xe9\xff")
def test_any_body_leaves_the_router_alive(router: httpx.Client, body: Any, accept: bytes) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    # Of the bytes that a client can put into a header at all.
    header = {"accept": bytes(byte for byte in accept if byte > 0x20 and byte != 0x7F)}
    for path in ("/rollout/generate", "/engines"):
        assert router.post(path, content=content, headers=header).status_code < 500
    assert router.delete("/engines", params={"url": str(body)}).status_code == 400
