"""A browser's way through `web.guard`: it cannot send a token in a header, so it gets a cookie for one."""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from verst.web.guard import TOKEN_VARIABLE, bearer

LOGIN = "/login"
_COOKIE = "verst_dashboard"
_MOST_BYTES = 4096
_FORM = f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>verst dashboard</title><body><main><h1>verst dashboard</h1><form method="post" action="{LOGIN}">
<p><label>Token (the server's {TOKEN_VARIABLE}) <input name="token" type="password" autocomplete="off" autofocus></label>
<button>Open</button></p></form></main></body></html>"""


class BrowserAccess:
    """ASGI middleware around the guard: turns the cookie into the header that the guard wants."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        if scope["path"] == LOGIN:
            await (await self._login(request))(scope, receive, send)
            return
        known = hmac.compare_digest(request.cookies.get(_COOKIE, "").encode(), _mark(self._token).encode())
        headers = Headers(scope=scope)
        if known and "authorization" not in headers:
            MutableHeaders(scope=scope).update(bearer(self._token))
        elif not known and "authorization" not in headers and "text/html" in headers.get("accept", ""):
            await RedirectResponse(LOGIN, 303)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _login(self, request: Request) -> Response:
        if request.method != "POST":
            return HTMLResponse(_FORM)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                return HTMLResponse(_FORM, 413)
        given = parse_qs(body.decode("utf-8", errors="replace")).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return HTMLResponse(_FORM, 401)
        response = RedirectResponse("/", 303)
        response.set_cookie(_COOKIE, _mark(self._token), httponly=True, samesite="strict")
        return response


def _mark(token: str) -> str:
    """What the browser keeps: it opens this page, and is not the token that opens engines."""
    return hmac.digest(token.encode(), b"dashboard", "sha256").hex()
