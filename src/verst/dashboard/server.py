"""The live page: static modules, a stream of what is new in each run, and samples and spans when they are asked for.

GET /                               the page
GET /api/stream                     server-sent events: `runs` (who is there), then `run` (what is new in one)
GET /api/runs/{n}/spans             from, to (microseconds), since (spans), limit
GET /api/runs/{n}/groups            iteration
GET /runs/{n}/samples/{path}        files below the run's samples/, with ranges
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from verst.dashboard.access import BrowserAccess
from verst.dashboard.page import STATIC, live_page
from verst.dashboard.run import RunView, Seen, find_runs, new_runs
from verst.web.guard import Guard, check_exposed, token_from_environment
from verst.web.listen import listen, url_of

POLL_S = 0.5
"""Between two looks at the files, while somebody watches."""
_SEARCH_S = 5.0
"""Between two looks for new runs in the folders."""
_HEARTBEAT_S = 15.0
MAX_SPANS = 200_000
"""That one answer has at most: all of some ten thousand microgroups."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


class Runs:
    """The runs of one page, read again no more often than every POLL_S, whoever asks."""

    def __init__(self, paths: Sequence[Path], *, closing: Callable[[], bool] = lambda: False) -> None:
        """paths: as of `find_runs`. closing: the server is ending, and streams are to end too. Raises ConfigError."""
        self.views = find_runs(paths)
        self._paths = list(paths)
        self._closing = closing
        self._lock = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._read_s = self._searched_s = float("-inf")

    @contextlib.asynccontextmanager
    async def fresh(self) -> AsyncIterator[None]:
        """Inside it `views` are up to date and stay as they are: a thread reads files into them at other times."""
        async with self._lock:
            if self._reading is None:
                self._reading = asyncio.create_task(asyncio.to_thread(self._read))
            # A page that closes cancels who waits, not the thread: the next one waits for its end before it reads again.
            try:
                await asyncio.shield(self._reading)
            finally:
                if self._reading.done():
                    self._reading = None
            yield

    def _read(self) -> None:
        """What is due."""
        now_s = time.monotonic()
        if now_s - self._searched_s >= _SEARCH_S:
            self.views += new_runs(self._paths, self.views)
            self._searched_s = now_s
        if now_s - self._read_s >= POLL_S:
            for view in self.views:
                view.refresh()
            self._read_s = time.monotonic()

    def close(self) -> None:
        for view in self.views:
            view.close()

    def of(self, request: Request) -> RunView:
        number = int(request.path_params["number"])
        if number >= len(self.views):
            raise HTTPException(404, f"there is no run {number}")
        return self.views[number]

    async def messages(self) -> AsyncIterator[str]:
        """Server-sent events of one page, until the server ends."""
        seen: list[Seen] = []
        sent_s = time.monotonic()
        while not self._closing():
            async with self.fresh():
                events = self._news(seen)
            for text in events:
                yield text
                sent_s = time.monotonic()
            if time.monotonic() - sent_s > _HEARTBEAT_S:
                yield ": still here\n\n"
                sent_s = time.monotonic()
            await asyncio.sleep(POLL_S)

    def _news(self, seen: list[Seen]) -> list[str]:
        """What a page is to be told; `seen` is moved on."""
        events = []
        if len(seen) < len(self.views):
            names = [{"number": view.number, "name": view.name} for view in self.views]
            events.append(_event("runs", {"runs": names, "first": not seen}))
            seen += [Seen() for _ in self.views[len(seen) :]]
        for view, told in zip(self.views, seen, strict=True):
            message = view.news(told)
            if message is not None:
                events.append(_event("run", message))
        return events


def make_app(runs: Runs, *, token: str | None = None) -> Starlette:
    """token: that a client must know; None for a page on loopback."""

    async def page(_: Request) -> Response:
        return Response(live_page(), media_type="text/html")

    async def stream(_: Request) -> Response:
        return StreamingResponse(runs.messages(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def spans(request: Request) -> Response:
        view = runs.of(request)
        low, high, since, limit = (_number(request, name) for name in ("from", "to", "since", "limit"))
        shown = min(MAX_SPANS, int(limit)) if limit else MAX_SPANS
        async with runs.fresh():
            found = await asyncio.to_thread(view.spans.window, low, high, since=int(since or 0), limit=max(1, shown))
            return JSONResponse(found)

    async def groups(request: Request) -> Response:
        view = runs.of(request)
        return JSONResponse({"groups": view.groups.of(int(_number(request, "iteration") or 0))})

    async def sample(request: Request) -> Response:
        path = runs.of(request).file(request.path_params["path"])
        if path is None:
            raise HTTPException(404, "no such sample")
        return FileResponse(path)

    middleware = [Middleware(_SecurityHeaders), Middleware(Guard, token=token, public=())]
    if token is not None:
        middleware.insert(1, Middleware(BrowserAccess, token=token))
    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/stream", stream),
            Route("/api/runs/{number:int}/spans", spans),
            Route("/api/runs/{number:int}/groups", groups),
            Route("/runs/{number:int}/samples/{path:path}", sample),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=middleware,
    )


def serve(paths: Sequence[Path], *, host: str, port: int) -> None:
    """Until SIGINT or SIGTERM. Raises ConfigError where there are no runs, and for an address that cannot be listened
    on, or may not be."""
    token = token_from_environment()
    check_exposed(host, token, key="--host")
    runs = Runs(paths, closing=lambda: server.should_exit)
    sock = listen(host, port, keys="--{}")
    print(f"{len(runs.views)} run(s) at {url_of(sock)}/  (Ctrl-C ends)", flush=True)
    server = uvicorn.Server(
        uvicorn.Config(make_app(runs, token=token), log_level="warning", timeout_graceful_shutdown=5)
    )
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[sock])
    finally:
        sock.close()
        runs.close()


class _SecurityHeaders:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", _POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cache-control", b"no-cache"),
                ]
            await send(message)

        await self._app(scope, receive, with_headers)


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n"


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise HTTPException(400, f"{name} = {text!r} must be a number") from None
