"""The two ends of a service's connections: its socket, bound and listening before anything is loaded so that what is wrong
is said at once, and clients that go away."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from verst.errors import ConfigError

T = TypeVar("T")


def listen(host: str, port: int, *, keys: str) -> socket.socket:
    """port 0 takes any free one. keys: of the two values, with {} for which, e.g. "engine.{}".

    Raises ConfigError when the port or the address cannot be had.
    """
    host_key, port_key = keys.format("host"), keys.format("port")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"{host_key} = {host!r} is no address of this machine: {error.strerror}") from error
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        # Two sockets can be bound to one port until one of them listens.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{port_key} = {port} is in use on {host}: choose another {port_key}, or 0 for any free one"
            ) from error
        raise ConfigError(
            f"{host_key} = {host!r}, {port_key} = {port} cannot be listened on: {error.strerror}"
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class ClientGone(Exception):
    """The client of a request went away before the work for it was done."""


async def while_there(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What the work returns or raises. When the client of the request, whose body must have been read, leaves before, the
    work is cancelled and has ended when ClientGone is raised."""
    job, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientGone
        return job.result()
    finally:
        gone.cancel()
        job.cancel()
        await asyncio.wait({job})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
