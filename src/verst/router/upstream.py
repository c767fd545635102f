"""The engines as the router asks them: one HTTP client, looks at their health, and which headers go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from verst.errors import RequestError
from verst.router.pool import Probe
from verst.web import timing
from verst.web.guard import bearer
from verst.web.terms import SHARED

_REQUEST_HEADERS = ("accept-encoding", "content-type")
_ANSWER_HEADERS = ("content-type", "content-length", "content-encoding", "retry-after", timing.HEADER)
_OURS = "verst-"
"""Of headers that are the engines' own, and go on in both directions."""
_CONNECT_S = 5.0


def client(token: str | None) -> httpx.AsyncClient:
    """For all engines; close it."""
    return httpx.AsyncClient(
        headers=bearer(token),
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=5.0),
        # Engines are reached directly, whatever proxy the environment names.
        trust_env=False,
    )


def checked_url(url: object) -> str:
    """The address of an engine in its one form. Raises RequestError."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        # A port that is no number is found only when it is asked for.
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        named = False
    if not named or parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise RequestError(f"{url!r} is not the address of an engine, e.g. http://127.0.0.1:30000")
    return f"{parts.scheme}://{parts.netloc.lower()}"


def record_of(body: bytes) -> dict[str, Any]:
    """A request's body. Raises RequestError where it is no JSON record."""
    try:
        record = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise RequestError(f"the body is a JSON {type(record).__name__}, a request is a record")
    return record


def request_headers(headers: Mapping[str, str], *, shared: bool) -> dict[str, str]:
    """Those of a client's request that the engine shall see. shared: it may answer in shared memory."""
    passed = {name: value for name, value in headers.items() if name in _REQUEST_HEADERS or name.startswith(_OURS)}
    accepted = headers.get("accept", "*/*").split(",")
    kept = [part.strip() for part in accepted if shared or part.split(";")[0].strip() != SHARED]
    # Without one, httpx would say what it can decode itself, and the answer is to go on as it is.
    return {"accept-encoding": "identity", **passed, "accept": ", ".join(kept) or "*/*"}


def answer_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of an engine's answer that its client shall see."""
    return {name: value for name, value in headers.items() if name in _ANSWER_HEADERS or name.startswith(_OURS)}


async def look(http: httpx.AsyncClient, url: str, *, timeout_s: float) -> Probe:
    """One look at an engine; whatever goes wrong with it is what is found."""
    try:
        async with asyncio.timeout(timeout_s):
            health = await http.get(f"{url}/health")
            if health.status_code != 200:
                return _unwell(health)
            info = await http.get(f"{url}/server_info")
    except TimeoutError:
        return Probe(problem=f"no answer to a probe in {timeout_s:g} s", silent=True)
    except httpx.TransportError as error:
        return Probe(problem=f"cannot be reached: {explain(error)}")
    said = _record(info) if info.status_code == 200 else {}
    host = said.get("host") if "shared_memory" in said else None
    return Probe(
        asleep=said.get("state") == "asleep",
        version=_whole(said.get("weight_version")),
        invalid=bool(said.get("invalid_weights")),
        host=host if isinstance(host, str) else None,
        queue_size=_whole(said.get("queue_size")),
    )


def explain(error: httpx.TransportError) -> str:
    return f"{type(error).__name__} {error}".strip()


def message_of(response: httpx.Response) -> str:
    """What an answer says of a failure; it must have been read."""
    said = _record(response)
    return str(said.get("detail") or said.get("message") or response.text[:500] or f"HTTP {response.status_code}")


def _unwell(health: httpx.Response) -> Probe:
    status = _record(health).get("status")
    return Probe(problem=message_of(health), loading=status == "loading")


def _record(response: httpx.Response) -> dict[str, Any]:
    try:
        return record_of(response.content)
    except RequestError:
        return {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
