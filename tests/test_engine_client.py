"""The client trusts nothing: every parameter of the echo is compared, and a broken server is named."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import folder, made, request  # noqa: F401

from verst.engine.client import EngineClient, check_echo
from verst.engine.wire import GenerateRequest
from verst.engine.worker import Worker
from verst.errors import EchoError, EngineError, RequestError

FULL: dict[str, Any] = {
    "negative_prompt": "7",
    "seed": 11,
    "generator_device": "cpu",
    "num_outputs_per_prompt": 2,
    "guidance_scale": 3.0,
    "true_cfg_scale": 3.0,
    "num_frames": 1,
    "fps": 8.0,
    "rollout_debug_mode": True,
    "rollout_sde_step_indices": (0, 2),
    "rollout_return_step_indices": (0, 1, 2, 3),
    "rollout_noise_level": 0.5,
    "rollout_storage_dtype": "bfloat16",
    "initial_seeds": (5, 6),
    "sigma_shift": 2.0,
    "suppress_logs": True,
    "key": (3, 4),
}
"""Every field that a request can carry, set."""


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:  # noqa: F811
    return Worker(folder)


@pytest.fixture(scope="module")
def echo(worker: Worker) -> dict[str, Any]:
    return made(worker, request(**FULL))[0].echo


def other(value: Any) -> Any:
    """A value that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value[:-1], other(value[-1])]
    return f"{value}-not"


SENT = sorted(request(**FULL).model_dump(exclude_none=True))


@pytest.mark.parametrize("name", [*SENT, "prompts", "truncated_prompts"])
def test_every_parameter_that_differs_is_named(echo: dict[str, Any], name: str) -> None:
    asked = request(**FULL)
    check_echo(asked, echo, weight_version=-1, sigmas=echo["sigmas"], model_dtype="float32")
    with pytest.raises(EchoError, match=rf"^{name}: .*the engine used"):
        check_echo(asked, {**echo, name: other(echo[name])})
    with pytest.raises(EchoError, match=rf"^{name}: .*does not say"):
        check_echo(asked, {key: value for key, value in echo.items() if key != name})


def test_weights_sigmas_and_dtype_are_compared_where_given(echo: dict[str, Any]) -> None:
    asked = request(**FULL)
    with pytest.raises(EchoError, match=r"weight_version: 3 was asked for, the engine used -1"):
        check_echo(asked, echo, weight_version=3)
    with pytest.raises(EchoError, match="model_dtype"):
        check_echo(asked, echo, model_dtype="bfloat16")
    sigmas = [*echo["sigmas"][:-2], echo["sigmas"][-2] + 1e-4, 0.0]
    with pytest.raises(EchoError, match="sigmas"):
        check_echo(asked, echo, sigmas=sigmas)
    check_echo(asked, echo, sigmas=[s * (1 + 1e-12) for s in echo["sigmas"]])  # fp32 is what travels


def test_an_engine_that_may_cut_prompts_must_say_how_many(worker: Worker) -> None:
    asked = request(prompt="1 " * 40, long_prompts="truncate")
    echo = made(worker, asked)[0].echo
    check_echo(asked, echo)
    assert echo["truncated_prompts"] == 1
    with pytest.raises(EchoError, match="does not say how many prompts it cut"):
        check_echo(asked, {key: value for key, value in echo.items() if key != "truncated_prompts"})


def test_zero_is_not_false_and_not_the_default(worker: Worker) -> None:
    asked = request(guidance_scale=0, sigma_shift=None, rollout_noise_level=0, rollout_sde_step_indices=())
    echo = made(worker, asked)[0].echo
    check_echo(asked, echo)
    assert (echo["guidance_scale"], echo["rollout_noise_level"], echo["rollout_sde_step_indices"]) == (0, 0, [])
    for name, wrong in (("guidance_scale", 7.0), ("guidance_scale", False), ("rollout_sde_step_indices", [0, 1, 2, 3])):
        with pytest.raises(EchoError, match=name):
            check_echo(asked, {**echo, name: wrong})


def test_what_was_left_out_is_compared_with_what_it_means(worker: Worker) -> None:
    """None means all steps, and seeds that count up: an engine that means something else is caught."""
    asked = request(seeds=None, seed=3, num_outputs_per_prompt=2)
    echo = made(worker, asked)[0].echo
    check_echo(asked, echo)
    for name, wrong in (("rollout_sde_step_indices", [0]), ("seeds", [3, 3]), ("rollout_return_step_indices", [4])):
        with pytest.raises(EchoError, match=name):
            check_echo(asked, {**echo, name: wrong})


def test_plain_sampling_claims_no_rollout_parameters(worker: Worker) -> None:
    asked = request(rollout=False, prompt=None, prompts=("1", "2"))
    echo = made(worker, asked)[0].echo
    check_echo(asked, echo)
    assert echo["rollout_sde_type"] is None
    with pytest.raises(EchoError, match="rollout"):
        check_echo(asked, {**echo, "rollout": True})


def test_extra_parameters_and_the_engines_own_device(worker: Worker) -> None:
    asked = request(seeds=None, seed=1, generator_device="cuda", extra_sampling_params={"seed": [8, 7]})
    echo = made(worker, asked)[0].echo
    check_echo(asked, echo)
    assert (echo["seeds"], echo["generator_device"]) == ([8, 7], "cpu")


Answer = Callable[[int], bytes]
"""Number of the request -> the raw bytes the server answers, after which it closes."""


async def against(answer: Answer, ask: Callable[[EngineClient], Awaitable[Any]], **options: Any) -> tuple[int, Any]:
    """A hand-written server that reads each request and answers what it is told; returns (requests, outcome)."""
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(size)
        count += 1
        writer.write(answer(count))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, EngineClient(f"http://127.0.0.1:{port}", **options) as client:
        try:
            outcome = await ask(client)
        except (EngineError, RequestError) as error:
            outcome = error
    return count, outcome


def http_answer(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def generate(client: EngineClient) -> bytes:
    return (await client.generate(request())).portable()


def test_busy_is_tried_again_and_nothing_else() -> None:
    busy = http_answer("503 Busy", b'{"detail": "full"}')
    good = http_answer("200 OK", b"payload")
    count, outcome = asyncio.run(against(lambda n: busy if n < 3 else good, generate))
    assert (count, outcome) == (3, b"payload")
    count, outcome = asyncio.run(against(lambda n: busy, generate, busy_s=0.5))
    assert count > 1
    assert "is not available: full" in str(outcome)
    for status, kind in (("500 Oops", EngineError), ("504 Late", EngineError), ("400 Bad", RequestError)):
        count, outcome = asyncio.run(against(lambda n, s=status: http_answer(s, b'{"detail": "why"}'), generate))
        assert count == 1
        assert isinstance(outcome, kind)
        assert "why" in str(outcome)


@pytest.mark.parametrize("cut", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"], ids=["nothing", "half"])
def test_a_dropped_connection_names_the_engine(cut: bytes) -> None:
    count, outcome = asyncio.run(against(lambda n: cut, generate))
    assert count == 1
    assert isinstance(outcome, EngineError)
    assert "engine http://127.0.0.1:" in str(outcome)
    assert "dropped /rollout/generate" in str(outcome)


def test_a_refused_connection_is_given_up_after_its_time() -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        async with EngineClient(f"http://127.0.0.1:{port}", refused_s=0.3) as client:
            assert not await client.health()
            with pytest.raises(EngineError, match=f"http://127.0.0.1:{port} cannot be reached"):
                await client.generate(GenerateRequest(prompt="1", seed=1))

    asyncio.run(scenario())
