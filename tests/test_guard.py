"""Who may ask a service, how much and for how long: against a small application, over real HTTP where it matters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from http_fixtures import serving
from hypothesis import given
from hypothesis import strategies as st
from loop_fixtures import on_a_loop
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from verst.errors import ConfigError, RequestError
from verst.web.guard import (
    DEFAULT,
    Guard,
    Limits,
    bearer,
    check_exposed,
    is_loopback,
    new_token,
    token_from_environment,
)
from verst.web.terms import Terms

TOKEN = "a-token-that-nobody-guesses"


def application(token: str | None = None, limits: Limits = DEFAULT) -> Starlette:
    async def count(request: Request) -> Response:
        return JSONResponse({"bytes": len(await request.body())})

    routes = [Route("/count", count, methods=["POST", "GET"]), Route("/liveness", count)]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token, limits=limits)])


@asynccontextmanager
async def asking(
    token: str | None = None, limits: Limits = DEFAULT, base_url: str = "http://localhost:1"
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=application(token, limits))
    async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
        yield client


@on_a_loop
async def test_a_token_is_wanted_on_everything_but_liveness() -> None:
    async with asking(TOKEN, base_url="http://engine.example:1") as client:
        for headers in (
            {},
            bearer("another-token-altogether"),
            {"authorization": TOKEN},
            {"authorization": "Bearer é"},
        ):
            sent = [(name.encode(), value.encode()) for name, value in headers.items()]
            refused = await client.post("/count", content=b"12", headers=sent)
            assert refused.status_code == 401
            assert TOKEN not in refused.text
        assert (await client.post("/count", content=b"12", headers=bearer(TOKEN))).json() == {"bytes": 2}
        assert (await client.get("/liveness")).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1:30000"}, 200),
        ({"host": "[::1]:30000"}, 200),
        ({"origin": "http://localhost:8080"}, 200),
        ({"host": "rebound.example:30000"}, 403),
        ({"host": "10.0.0.7"}, 403),
        ({"origin": "https://a.page.example"}, 403),
        ({"origin": "null"}, 403),
    ],
    ids=str,
)
@on_a_loop
async def test_without_a_token_only_this_machine_asks_and_no_page_of_a_browser(
    headers: dict[str, str], status: int
) -> None:
    async with asking() as client:
        assert (await client.post("/count", content=b"1", headers=headers)).status_code == status


@on_a_loop
async def test_a_body_over_its_limit_is_refused_announced_or_not() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 50

    limits = Limits(body_bytes=100, body_bytes_at={"/liveness": 10})
    async with asking(limits=limits) as client:
        for body in (b"x" * 101, pieces()):
            refused = await client.post("/count", content=body)
            assert refused.status_code == 413
            assert "/count takes at most 100" in refused.json()["detail"]
        assert (await client.post("/count", content=b"x" * 100)).json() == {"bytes": 100}
        assert (await client.request("GET", "/liveness", content=b"x" * 11)).status_code == 413


@on_a_loop
async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verst.web.guard._GRACE_S", 0.05)
    monkeypatch.setattr("verst.web.guard._LINGER_S", 0.05)
    async with serving(application()) as url:
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /count HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nhal")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"3 bytes and not its end" in answer
        writer.close()


@on_a_loop
async def test_an_answer_that_nobody_takes_is_given_up() -> None:
    async def send(message: dict[str, object]) -> None:
        await asyncio.Event().wait()

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/count", "headers": [], "query_string": b""}
    with pytest.raises(TimeoutError):
        await application(limits=Limits(taken_s=0.05))(scope, receive, send)  # type: ignore[arg-type]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("VERST_TOKEN", raising=False)
    return monkeypatch


def test_the_token_of_the_environment(environment: pytest.MonkeyPatch) -> None:
    assert token_from_environment() is None
    environment.setenv("VERST_TOKEN", TOKEN)
    assert token_from_environment() == TOKEN
    for bad in ("short", "has a space in it, so no", "näher-am-wasser-gebaut"):
        environment.setenv("VERST_TOKEN", bad)
        with pytest.raises(ConfigError, match="VERST_TOKEN must be at least 16") as error:
            token_from_environment()
        assert bad not in str(error.value)
    assert new_token() != new_token()


def test_what_others_can_reach_needs_a_token() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "LOCALHOST"):
        assert is_loopback(host)
        check_exposed(host, None, key="engine.host")
    for host in ("0.0.0.0", "::", "10.0.0.7", "gpu-3", "127.example.org"):
        assert not is_loopback(host)
        check_exposed(host, TOKEN, key="engine.host")
        with pytest.raises(ConfigError, match=r"engine\.host = .* set the environment variable VERST_TOKEN"):
            check_exposed(host, None, key="engine.host")


versions = st.none() | st.integers(-1, 20)


@given(exact=versions, least=versions, held=versions, seconds=st.none() | st.floats(0.001, 1e6))
def test_terms_survive_their_headers_and_admit_what_they_say(
    exact: int | None, least: int | None, held: int | None, seconds: float | None
) -> None:
    terms = Terms(version=exact, min_version=least, timeout_s=seconds)
    assert Terms.of(terms.headers()) == terms
    wanted = (exact is None or held == exact) and (least is None or (held is not None and held >= least))
    assert terms.admits(held) == wanted


@pytest.mark.parametrize(
    "headers",
    [
        {"verst-weight-version": "seven"},
        {"verst-weight-version": ""},
        {"verst-min-weight-version": "1.5"},
        {"verst-timeout-s": "0"},
        {"verst-timeout-s": "-3"},
        {"verst-timeout-s": "nan"},
        {"verst-timeout-s": "inf"},
        {"verst-timeout-s": "soon"},
    ],
    ids=str,
)
def test_terms_that_are_none(headers: dict[str, str]) -> None:
    with pytest.raises(RequestError, match=next(iter(headers))):
        Terms.of(headers)
