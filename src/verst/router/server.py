"""The router as the process of `verst router`, or in a thread of an actor process."""

from __future__ import annotations

import logging
import threading

import uvicorn

from verst.router.app import Router
from verst.router.options import RouterOptions
from verst.web.guard import check_exposed
from verst.web.listen import listen, url_of


def serve(options: RouterOptions, *, host: str, port: int, token: str | None) -> None:
    """Until SIGINT or SIGTERM. Raises ConfigError for an address that cannot be had, or not without a token."""
    check_exposed(host, token, key="--host")
    # What happens to engines is told on stderr; requests are counted and not told.
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    router = Router(options, token=token)
    sock = listen(host, port, keys="--{}")
    print(f"the router of {len(options.engines)} engines is at {url_of(sock)}", flush=True)
    _server(router).run(sockets=[sock])


def serve_beside(options: RouterOptions, *, host: str, port: int, token: str | None) -> str:
    """The URL, bound; requests are served from a thread until the process ends.

    Raises ConfigError for an address that cannot be had, or not without a token.
    """
    check_exposed(host, token, key="engine.router.host")
    sock = listen(host, port, keys="engine.router.{}")
    server = _server(Router(options, token=token))
    threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="verst-router-http", daemon=True).start()
    return url_of(sock)


def _server(router: Router) -> uvicorn.Server:
    config = uvicorn.Config(
        router.app,
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=5,
        # Longer than clients keep idle connections, so that none is closed under a request.
        timeout_keep_alive=75,
    )
    return uvicorn.Server(config)
