"""A request for samples on its way to one engine, and to another one where the first cannot.

    take an engine ─> send ─┬─ refused connection, 503, 409 ──────────────> it has not begun: take again
      (or wait)             ├─ connection lost before the answer began ───> once more, elsewhere: seeds make the same samples
                            ├─ made by weights that it does not want ─────> dropped: take again
                            └─ anything else ─────────────────────────────> relay

Waiting, sending and sending again share the request's one deadline, and all end when its client goes away.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import httpx

from verst.errors import EngineError, RequestError
from verst.router.dispatch import Dispatcher
from verst.router.metrics import Metrics
from verst.router.pool import Member, Pool, Shape
from verst.router.relay import Relay
from verst.router.upstream import explain, message_of, record_of, request_headers
from verst.web.terms import ENGINE, REISSUED, TIMEOUT, WEIGHT_VERSION, Terms

_log = logging.getLogger(__name__)
_SHAPE = ("height", "width", "num_frames", "fps", "num_inference_steps", "guidance_scale", "true_cfg_scale")
"""Fields that requests of one batch have in common."""
_RETRIES = 1
"""Of requests that an engine may have begun: one that ends every engine shall not end all of them."""


class Dropped(EngineError):
    """Engines were lost over the request (HTTP 502)."""


class TimedOut(EngineError):
    """The answer did not begin in the request's time (HTTP 504)."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request as it came."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    """Names in lower case."""
    terms: Terms
    shape: Shape


class Proxy:
    """Used on one event loop."""

    def __init__(
        self, pool: Pool, dispatcher: Dispatcher, http: httpx.AsyncClient, metrics: Metrics, *, timeout_s: float
    ) -> None:
        """timeout_s: for requests that name no time, and the most for those that do."""
        self._pool, self._dispatcher, self._http, self._metrics = pool, dispatcher, http, metrics
        self._timeout_s = timeout_s
        self._shared_host: str | None = None

    def shared_host(self) -> str | None:
        """The host whose shared memory clients may agree on. Once one was named it is never another one."""
        host = self._pool.shared_host
        self._shared_host = self._shared_host or host
        return host if host == self._shared_host else None

    async def answer(self, ask: Ask) -> Relay:
        """The answer of an engine, begun. Raises Full, Never, Late, TimedOut, Dropped."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        relay = await self._attempts(ask, start + min(self._timeout_s, ask.terms.timeout_s or self._timeout_s))
        self._metrics.answer_s.observe(loop.time() - start)
        return relay

    async def _attempts(self, ask: Ask, until: float) -> Relay:
        loop = asyncio.get_running_loop()
        lost = reissued = 0
        while True:
            start = loop.time()
            member = await self._dispatcher.take(ask.shape, ask.terms, until=until)
            self._metrics.wait_s.observe(loop.time() - start)
            outcome = await self._attempt(ask, member, until, reissued)
            if isinstance(outcome, Relay):
                return outcome
            lost += outcome.kind == "lost"
            if lost > _RETRIES:
                raise Dropped(f"{lost} engines were lost over this request; the last: {outcome.reason}")
            reissued += outcome.kind in ("lost", "refused")
            self._metrics.retries.labels(outcome.kind).inc()

    async def _attempt(self, ask: Ask, member: Member, until: float, reissued: int) -> Relay | _Again:
        """One engine's answer, or why another is to be asked. The engine is given back in any other case.

        reissued: times that an engine was lost over the request before.
        """
        kept = False
        try:
            async with asyncio.timeout_at(until):
                answer = await self._http.send(self._request(ask, member, until), stream=True)
                again = await self._judged(ask, member, answer)
            if again is not None:
                await answer.aclose()
                kept = again.kind == "busy"
                if kept:
                    self._dispatcher.refused(member, ask.shape)
                return again
            kept = True
            return Relay(
                answer,
                more={ENGINE: member.url, REISSUED: str(reissued)},
                metrics=self._metrics,
                ended=lambda problem: self._ended(member, ask, answer, problem),
                left=lambda: self._dispatcher.put_back(member, ask.shape),
            )
        except TimeoutError:
            raise TimedOut(f"{member.url} did not begin to answer in the time that the request had") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            kept = True
            return self._lost(ask, member, "refused", f"cannot be reached: {explain(error)}")
        except httpx.LocalProtocolError as error:
            # The request could not be written: no fault of an engine.
            raise RequestError(f"the request's headers cannot be passed on: {error}") from error
        except httpx.TransportError as error:
            kept = True
            return self._lost(ask, member, "lost", f"dropped a request: {explain(error)}")
        finally:
            if not kept:
                # The client has gone or the time is up, which the engine sees as a closed connection.
                self._dispatcher.put_back(member, ask.shape)

    async def _judged(self, ask: Ask, member: Member, answer: httpx.Response) -> _Again | None:
        """Why the answer is none for this client; None = it is one."""
        if answer.status_code in (503, 409):
            await answer.aread()
            if answer.status_code == 503:
                return _Again("busy", f"{member.url}: {message_of(answer)}")
            # It knows better than we do which weights it holds.
            member.doubted = True
            self._dispatcher.wanting.set()
            return _Again("weights", message_of(answer))
        made_by = answer.headers.get(WEIGHT_VERSION, "")
        if not answer.is_success or not made_by.lstrip("-").isdecimal():
            return None
        if int(made_by) != member.version:
            self._pool.saw_version(member, int(made_by))
            self._dispatcher.weights_changed()
        return None if ask.terms.admits(int(made_by)) else _Again("weights", f"made by weights of version {made_by}")

    def _request(self, ask: Ask, member: Member, until: float) -> httpx.Request:
        left = until - asyncio.get_running_loop().time()
        shared = member.host is not None and member.host == self._shared_host
        passed = {**request_headers(ask.headers, shared=shared), TIMEOUT: f"{max(left, 0.001):.3f}"}
        # As they came: header values are bytes, which starlette shows as latin-1.
        headers = [(name.encode(), value.encode("latin-1")) for name, value in passed.items()]
        return self._http.build_request("POST", f"{member.url}{ask.path}", content=ask.body, headers=headers)

    def _lost(self, ask: Ask, member: Member, kind: str, problem: str) -> _Again:
        _log.warning("%s %s", member.url, problem)
        self._dispatcher.done(member, ask.shape, problem=problem, at_once=True)
        return _Again(kind, f"{member.url} {problem}")

    def _ended(self, member: Member, ask: Ask, answer: httpx.Response, problem: str | None) -> None:
        # 504: the request had less time than it needed.
        if problem is None and answer.status_code >= 500 and answer.status_code != 504:
            problem = f"answers with HTTP {answer.status_code}"
        self._dispatcher.done(member, ask.shape, problem=problem)


@dataclass(frozen=True)
class _Again:
    kind: str
    """refused, lost, busy or weights."""
    reason: str


def ask_of(path: str, body: bytes, headers: Mapping[str, str]) -> Ask:
    """Raises RequestError for a body that is no JSON record, or terms that are none."""
    record = record_of(body)
    shape = tuple(json.dumps(record.get(name)) for name in _SHAPE)
    return Ask(path=path, body=body, headers=headers, terms=Terms.of(headers), shape=shape)


def without_terms(ask: Ask) -> Ask:
    """The same for any engine, whatever it holds."""
    return replace(ask, terms=Terms(timeout_s=ask.terms.timeout_s))
