"""The router's HTTP endpoints: those of an engine, as one engine would have them, and those of the pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import verst
from verst.errors import EngineError, RequestError, VerstError
from verst.router import upstream
from verst.router.broadcast import MEMORY, QUESTIONS, REFUSED, UPDATES, Broadcaster, Unequal
from verst.router.dispatch import Dispatcher, Full, Late, Never
from verst.router.metrics import CONTENT_TYPE, Metrics
from verst.router.options import RouterOptions
from verst.router.pool import Member, Pool
from verst.router.prober import Prober
from verst.router.proxy import Dropped, Proxy, TimedOut, ask_of, without_terms
from verst.router.upstream import checked_url, record_of
from verst.web.guard import Guard, Limits
from verst.web.listen import ClientGone, while_there

GENERATE = "/rollout/generate"
CHECKS = ("/rollout/check_prompts", "/rollout/check_requests")
"""Answered by any one engine."""
_LIMITS = Limits(body_bytes=64 * 2**20, body_bytes_at={GENERATE: 16 * 2**20, **dict.fromkeys(CHECKS, 512 * 2**20)})
_STATUS: dict[type[VerstError], int] = {
    Full: 503,
    Late: 503,
    Never: 409,
    TimedOut: 504,
    Dropped: 502,
    Unequal: 502,
    RequestError: 400,
    EngineError: 503,
}
"""The first that fits is taken."""


class Router:
    """Its parts, put together. `app` is the ASGI application; `pool` is what tests look at."""

    def __init__(self, options: RouterOptions, *, token: str | None = None) -> None:
        """token: that clients must know and that engines are asked with."""
        self.pool = Pool(options.policy)
        self._dispatcher = Dispatcher(self.pool, queue_size=options.queue_size)
        self.metrics = Metrics(self.pool, num_waiting=lambda: self._dispatcher.num_waiting)
        self._http = upstream.client(token)
        self._proxy = Proxy(self.pool, self._dispatcher, self._http, self.metrics, timeout_s=options.request_timeout_s)
        self._prober = Prober(
            self.pool, self._dispatcher, self._http, every_s=options.probe_s, timeout_s=options.probe_timeout_s
        )
        self._broadcaster = Broadcaster(
            self.pool, self._dispatcher, self._prober, self._http, timeout_s=options.update_timeout_s
        )
        self._under_way: set[asyncio.Task[Any]] = set()
        for url in options.engines:
            self.pool.add(checked_url(url))
        self.app = self._application(token)

    async def generate(self, request: Request) -> ASGIApp:
        self._dispatcher.check_room()
        ask = ask_of(request.url.path, await request.body(), request.headers)
        if request.url.path != GENERATE:
            ask = without_terms(ask)
        try:
            return await while_there(self._proxy.answer(ask), request.receive)
        except ClientGone:
            self.metrics.cancelled.inc()
            return Response(status_code=499)

    async def to_all(self, request: Request) -> Response:
        path, body = request.url.path, await request.body()
        # Not ended by its client's going away: an update that has begun is finished everywhere.
        task = asyncio.create_task(self._broadcaster.send(path, body))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            report = await asyncio.shield(task)
        except VerstError:
            self.metrics.updates.labels(path, "failed").inc()
            raise
        self.metrics.updates.labels(path, "done").inc()
        return JSONResponse(report)

    async def refuse(self, request: Request) -> Response:
        raise RequestError(
            f"{request.url.path} goes to an engine itself: the router would have to hold the weights for all of them. "
            "Send /update_weights_from_manifest or /update_weights_from_disk, which reach all engines."
        )

    async def add(self, request: Request) -> Response:
        record = record_of(await request.body())
        if set(record) != {"url"}:
            raise RequestError('the body must be {"url": "http://HOST:PORT"} and nothing else')
        url = checked_url(record["url"])
        member = self.pool.add(url)
        self._prober.follow()
        return JSONResponse(_row(member))

    async def put(self, request: Request) -> Response:
        record = record_of(await request.body())
        urls, version = record.get("engines"), record.get("weight_version")
        known = set(record) <= {"engines", "weight_version"}
        if not (known and isinstance(urls, list) and (version is None or type(version) is int)):
            raise RequestError(
                'the body must be {"engines": ["http://HOST:PORT", ...], "weight_version": 7}, the version a whole number or '
                "null, and nothing else"
            )
        members = self.pool.replace([checked_url(url) for url in urls], version=version)
        self._prober.follow()
        await asyncio.gather(*(self._prober.probe(member) for member in members))
        self._dispatcher.weights_changed()
        return JSONResponse([_row(member) for member in members])

    async def remove(self, request: Request) -> Response:
        url = checked_url(request.query_params.get("url"))
        in_flight = self.pool.remove(url)
        if in_flight is None:
            raise RequestError(f"there is no engine {url}; there are: {', '.join(self.pool.members) or 'none'}")
        self._dispatcher.weights_changed()
        return JSONResponse({"url": url, "in_flight": in_flight})

    async def engines(self, request: Request) -> Response:
        return JSONResponse([_row(member) for member in self.pool.members.values()])

    async def health(self, request: Request) -> Response:
        serving = [member.url for member in self.pool.in_service]
        if serving:
            return JSONResponse({"status": "ok", "engines": serving})
        return JSONResponse({"status": "no engine", "detail": self.pool.why_none_serves()}, 503)

    async def liveness(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def server_info(self, request: Request) -> Response:
        members = list(self.pool.members.values())
        info: dict[str, Any] = {
            "version": verst.__version__,
            "router": True,
            "engines": [_row(member) for member in members],
            "waiting": self._dispatcher.num_waiting,
        }
        if self.pool.current is not None:
            info["weight_version"] = self.pool.current
        host = self._proxy.shared_host()
        if host is None:
            info["no_shared_memory"] = "has engines on several hosts, or without shared memory"
        else:
            info |= {"host": host, "shared_memory": {"of": "the engines, which are all on this host"}}
        return JSONResponse(info)

    async def model_info(self, request: Request) -> Response:
        """Of the first engine in service that says it."""
        problem = self.pool.why_none_serves()
        for member in self.pool.in_service:
            try:
                response = await self._http.get(f"{member.url}/model_info", timeout=10.0)
            except httpx.TransportError as error:
                problem = f"{member.url}: {upstream.explain(error)}"
                continue
            return Response(response.content, response.status_code, media_type="application/json")
        raise EngineError(f"no engine is in service: {problem}")

    async def counts(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=None, headers={"content-type": CONTENT_TYPE})

    def _application(self, token: str | None) -> Starlette:
        posts: dict[str, Callable[[Request], Awaitable[ASGIApp]]] = {
            **dict.fromkeys((GENERATE, *CHECKS), self.generate),
            **dict.fromkeys((*UPDATES, *MEMORY, *QUESTIONS), self.to_all),
            **dict.fromkeys(REFUSED, self.refuse),
            "/engines": self.add,
        }
        gets: dict[str, Callable[[Request], Awaitable[ASGIApp]]] = {
            "/engines": self.engines,
            "/health": self.health,
            "/liveness": self.liveness,
            "/server_info": self.server_info,
            "/model_info": self.model_info,
            "/metrics": self.counts,
        }
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, handler, methods=["GET"]) for path, handler in gets.items()]
        routes.append(Route("/engines", self.remove, methods=["DELETE"]))
        routes.append(Route("/engines", self.put, methods=["PUT"]))

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            probing = asyncio.create_task(self._prober.run(), name="verst-router-prober")
            try:
                yield
            finally:
                probing.cancel()
                await asyncio.wait({probing, *self._under_way}, timeout=5.0)
                await self._http.aclose()

        handlers: dict[Any, Any] = {VerstError: self._failed}
        guards = [Middleware(_Counted, metrics=self.metrics), Middleware(Guard, token=token, limits=_LIMITS)]
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=guards)

    async def _failed(self, request: Request, error: Exception) -> Response:
        status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
        headers = {"Retry-After": "1"} if status == 503 else None
        return JSONResponse({"detail": str(error), "success": False, "message": str(error)}, status, headers)


class _Counted:
    """ASGI middleware: the statuses that requests for samples end with."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != GENERATE:
            await self._app(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)


def _row(member: Member) -> dict[str, Any]:
    return {
        "url": member.url,
        "state": member.state,
        "reason": member.reason,
        "silent": member.silent,
        "weight_version": member.version,
        "in_flight": member.in_flight,
        "served": member.num_served,
        "quarantines": member.num_quarantines,
    }
