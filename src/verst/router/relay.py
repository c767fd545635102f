"""An engine's answer on its way to a client, piece by piece: what the client does not take is not fetched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import httpx
from starlette.types import Receive, Scope, Send

from verst.router.metrics import Metrics
from verst.router.upstream import answer_headers, explain
from verst.web.listen import ClientGone, while_there

_log = logging.getLogger(__name__)


class Relay:
    """An ASGI answer. At most one piece, as it came from the socket, is in hand at a time."""

    def __init__(
        self,
        answer: httpx.Response,
        *,
        more: Mapping[str, str],
        metrics: Metrics,
        ended: Callable[[str | None], None],
        left: Callable[[], None],
    ) -> None:
        """answer: of which no body is read yet; more: headers of the router's own. One of these is called, once: ended, with what the engine did wrong, or
        left, where the client went away."""
        self._answer, self._more, self._metrics, self._ended, self._left = answer, more, metrics, ended, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem, whole = None, False
        try:
            await while_there(self._pass_on(send), receive)
            whole = True
        except ClientGone:
            self._metrics.cancelled.inc()
        except httpx.TransportError as error:
            problem = f"broke off in the middle of an answer: {explain(error)}"
            _log.warning("%s %s", self._answer.url, problem)
            # No end is sent: the server closes the connection, and the client sees that the answer is not whole.
        finally:
            if whole or problem is not None:
                self._ended(problem)
            else:
                self._left()
            await self._answer.aclose()

    async def _pass_on(self, send: Send) -> None:
        said = {**answer_headers(self._answer.headers), **self._more}
        headers = [(name.encode(), value.encode()) for name, value in said.items()]
        await send({"type": "http.response.start", "status": self._answer.status_code, "headers": headers})
        async for piece in self._answer.aiter_raw():
            self._metrics.in_hand.inc(len(piece))
            try:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            finally:
                self._metrics.in_hand.dec(len(piece))
            self._metrics.relayed.inc(len(piece))
        await send({"type": "http.response.body", "body": b""})
