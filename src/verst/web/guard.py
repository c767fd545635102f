"""Before a service answers: who may ask it, from where, how much, and for how long.

    bound to loopback                no token needed; a browser's page of another site is refused all the same
    bound elsewhere, or VERST_TOKEN  `Authorization: Bearer <token>` on everything but the public paths

The token comes from the environment or is made for one run in memory; it is in no command line, log or run folder.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verst.errors import ConfigError

TOKEN_VARIABLE = "VERST_TOKEN"
_SHORTEST_TOKEN = 16
_GRACE_S = 30.0
"""A body may take this long before its rate counts."""
_LINGER_S = 2.0
"""A refused body is read and dropped for this long: else the client sees a reset connection and not the answer."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one request to a service."""

    body_bytes: int = 64 * 2**20
    """Largest body of a request."""
    body_bytes_at: Mapping[str, int] = field(default_factory=dict)
    """Path -> the same, where it differs."""
    bytes_per_s: float = 2**20
    """Slowest rate at which a body may come, on average, after the first half minute."""
    taken_s: float = 120.0
    """Seconds for the client to take one piece of the answer."""


DEFAULT = Limits()


class Guard:
    """ASGI middleware. It must stand inside of what turns exceptions into answers: `Starlette(middleware=[...])`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None = None,
        limits: Limits = DEFAULT,
        public: Collection[str] = ("/liveness",),
    ) -> None:
        """token: None = the service is bound to loopback. public: paths that anybody may ask."""
        self._app, self._token, self._limits, self._public = app, token, limits, public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def passed_on(message: Message) -> None:
            nonlocal started
            started = True
            async with asyncio.timeout(self._limits.taken_s):
                await send(message)

        try:
            self._admit(scope["path"], Headers(scope=scope))
            await self._app(scope, self._measured(scope["path"], receive), passed_on)
        except _Refused as refusal:
            if started:
                raise
            await _discard(receive)
            await refusal.response()(scope, receive, send)

    def _admit(self, path: str, headers: Headers) -> None:
        if path not in self._public:
            if self._token is None:
                _check_origin(headers)
            elif not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self._token}".encode()):
                raise _Refused(401, f"this service wants the header Authorization: Bearer <{TOKEN_VARIABLE}>")
        announced = headers.get("content-length", "0")
        if announced.isdecimal():
            self._check_size(path, int(announced))

    def _check_size(self, path: str, nbytes: int) -> None:
        most = self._limits.body_bytes_at.get(path, self._limits.body_bytes)
        if nbytes > most:
            raise _Refused(413, f"the body has {nbytes} bytes or more, {path} takes at most {most}")

    def _measured(self, path: str, receive: Receive) -> Receive:
        start = asyncio.get_running_loop().time()
        total, whole = 0, False

        async def measured() -> Message:
            nonlocal total, whole
            if whole:
                return await receive()  # the client's leaving, whenever that is
            try:
                async with asyncio.timeout_at(start + _GRACE_S + total / self._limits.bytes_per_s):
                    message = await receive()
            except TimeoutError:
                raise _Refused(408, f"the body came too slowly: {total} bytes and not its end") from None
            total += len(message.get("body", b""))
            self._check_size(path, total)
            whole = not message.get("more_body", False)
            return message

        return measured


class _Refused(Exception):
    """Never leaves the guard."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self._status, self._detail = status, detail

    def response(self) -> JSONResponse:
        headers = {"connection": "close"}
        if self._status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(
            {"detail": self._detail, "success": False, "message": self._detail}, self._status, headers=headers
        )


def token_from_environment() -> str | None:
    """None where there is none. Raises ConfigError for one that could be guessed or cannot stand in a header."""
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        return None
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} must be at least {_SHORTEST_TOKEN} printable ASCII characters without spaces, "
            'e.g. of: python -c "import secrets; print(secrets.token_urlsafe(32))"'
        )
    return token


def new_token() -> str:
    """For the services of one run that nobody else asks; it is handed over in memory."""
    return secrets.token_urlsafe(32)


def bearer(token: str | None) -> dict[str, str]:
    """The headers of a client."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


def check_exposed(host: str, token: str | None, *, key: str) -> None:
    """Raises ConfigError, naming `key`, for a service that others can reach and everybody could use."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{key} = {host!r} can be reached from other machines: set the environment variable {TOKEN_VARIABLE} for the "
            'service and its clients, or listen on "127.0.0.1"'
        )


def is_loopback(host: str) -> bool:
    """Of an address or name as it is written, without asking a name service."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _check_origin(headers: Headers) -> None:
    """A page in a browser of this machine can reach loopback too, under its own site's name or by naming its own."""
    host = headers.get("host", "")
    if host and not is_loopback(_name(f"//{host}")):
        raise _Refused(
            403, f"asked as {host!r}: without {TOKEN_VARIABLE} this service is there for its own machine alone"
        )
    origin = headers.get("origin")
    if origin is not None and not is_loopback(_name(origin)):
        raise _Refused(403, f"asked by a page of {origin!r}")


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


async def _discard(receive: Receive) -> None:
    try:
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        return
