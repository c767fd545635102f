"""Engines without a model, over real HTTP, and a router before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from http_fixtures import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from verst.router.app import Router
from verst.router.options import RouterOptions
from verst.router.pool import Policy
from verst.web.terms import Terms

MSGPACK = "application/msgpack"


class FakeEngine:
    """Answers what a test says, and writes down what it was asked."""

    def __init__(self, version: int | None = 0, *, host: str | None = None, enforces: bool = True) -> None:
        """enforces: it refuses requests for other weights, as the native engine does."""
        self.version, self.host, self.enforces = version, host, enforces
        self.healthy, self.asleep = True, False
        self.status = 200
        self.answer: Sequence[bytes] = (b"an answer",)
        self.answer_headers: dict[str, str] = {}
        self.go = asyncio.Event()
        """Requests for samples wait for it."""
        self.go.set()
        self.asked: list[Request] = []
        self.bodies: list[bytes] = []
        self.num_left = 0
        """Clients that went away."""
        self.num_sent = 0
        """Bytes of answers that went out."""
        self.updates: list[tuple[str, dict[str, Any]]] = []
        self.update_status = 200
        self.certificate: dict[str, Any] = {"digest": "d"}
        self.says: Any = None
        """In the place of what it answers to what all engines are asked."""
        posts = {
            "/rollout/generate": self.generate,
            "/rollout/check_prompts": self.check,
            "/update_weights_from_manifest": self.update,
            "/update_weights_from_disk": self.update,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.resume,
            "/get_weights_checksum": self.checksum,
        }
        gets = {"/health": self.health, "/server_info": self.info, "/model_info": self.model}
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        self.app = Starlette(routes=[*routes, *(Route(path, handler) for path, handler in gets.items())])

    async def generate(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        self.asked.append(request)
        if self.enforces and not Terms.of(request.headers).admits(self.version):
            return JSONResponse({"detail": f"the engine holds weights of version {self.version}"}, 409)
        going, gone = asyncio.ensure_future(self.go.wait()), asyncio.ensure_future(_gone(request))
        await asyncio.wait({going, gone}, return_when=asyncio.FIRST_COMPLETED)
        left = gone.done()
        gone.cancel()
        going.cancel()
        if left:
            self.num_left += 1
            return Response(status_code=499)
        if self.status != 200:
            return JSONResponse({"detail": f"told to answer {self.status}"}, self.status)
        version = {} if self.version is None else {"verst-weight-version": str(self.version)}
        return StreamingResponse(self._pieces(), media_type=MSGPACK, headers={**version, **self.answer_headers})

    async def _pieces(self) -> AsyncIterator[bytes]:
        whole = False
        try:
            for piece in self.answer:
                self.num_sent += len(piece)
                yield piece
            whole = True
        finally:
            self.num_left += not whole

    async def check(self, request: Request) -> Response:
        return JSONResponse([f"seen by {self.version}"])

    async def update(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.updates.append((request.url.path, body))
        if self.update_status != 200:
            return JSONResponse({"detail": "no such tensor"}, self.update_status)
        self.version = body["version"]
        report = {"success": True, "weight_version": self.version, "certificate": self.certificate}
        return JSONResponse(self.says or report)

    async def release(self, request: Request) -> Response:
        self.asleep = True
        return JSONResponse(self.says or {"success": True})

    async def resume(self, request: Request) -> Response:
        self.asleep = False
        return JSONResponse({"success": True})

    async def checksum(self, request: Request) -> Response:
        return JSONResponse(self.says or {"transformer": f"sum of {self.version}"})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok" if self.healthy else "failed"}, 200 if self.healthy else 503)

    async def info(self, request: Request) -> Response:
        info: dict[str, Any] = {"state": "asleep" if self.asleep else "ready", "queue_size": 64}
        if self.version is not None:
            info["weight_version"] = self.version
        if self.host is not None:
            info |= {"host": self.host, "shared_memory": {}}
        return JSONResponse(info)

    async def model(self, request: Request) -> Response:
        return JSONResponse({"model_type": "diffusion"})


class Scene:
    """A router, its engines, and a client of the router."""

    def __init__(self, router: Router, url: str, http: httpx.AsyncClient, urls: list[str]) -> None:
        self.router, self.url, self.http, self.urls = router, url, http, urls

    async def generate(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return await self.http.post("/rollout/generate", json=body, headers=headers)

    def state(self, index: int) -> str:
        return self.router.pool.members[self.urls[index]].state


@contextlib.asynccontextmanager
async def scene(
    *engines: FakeEngine, token: str | None = None, max_staleness: int = 0, per_engine: int = 16, **options: Any
) -> AsyncIterator[Scene]:
    """Engines in service behind a router."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(engine.app)) for engine in engines]
        policy = Policy(per_engine=per_engine, max_staleness=max_staleness)
        values: dict[str, Any] = {"probe_s": 0.05, "engines": tuple(urls), "policy": policy, **options}
        router = Router(RouterOptions(**values), token=token)
        url = await stack.enter_async_context(serving(router.app))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False, timeout=30))
        await until(lambda: all(member.state != "starting" for member in router.pool.members.values()))
        yield Scene(router, url, http, urls)


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
