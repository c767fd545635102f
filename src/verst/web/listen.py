"""The two ends of a service's connections: its socket, bound and listening before anything is loaded so that what is wrong
is said at once, and clients that go away."""

from __future__ import annotations

import errno
import socket

from starlette.types import Receive

from verst.errors import ConfigError


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


async def disconnected(receive: Receive) -> None:
    """Returns when the client of a request is gone; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
