"""An engine as a server: in a background thread of an actor process, or as the process of `verst serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette

import verst
from verst.config.basis import CompileBackend
from verst.engine.app import create_app
from verst.engine.batching import Batcher
from verst.engine.blocks import BlockPool, supported
from verst.engine.ranked import LeadWorker
from verst.engine.ranks import EngineRanks, Meeting
from verst.engine.worker import Worker
from verst.errors import EngineError
from verst.families import recognise
from verst.flow.determinism import make_deterministic
from verst.web.guard import check_exposed
from verst.web.listen import listen, url_of
from verst.weights.block import host_identity
from verst.weights.loan import Loan

_log = logging.getLogger(__name__)


class EngineServer:
    """One model, one port, one event loop. `start` and `stop` from any thread, or `serve_forever` from the main one."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        fp32_modules: Sequence[str] = (),
        compiled: CompileBackend = "off",
        device: torch.device | str = "cpu",
        host: str = "127.0.0.1",
        port: int = 0,
        deterministic: bool = True,
        max_batch: int = 64,
        queue_size: int = 64,
        threads: int = 0,
        request_timeout_s: float = 600.0,
        prompt_cache_bytes: int = 256 * 2**20,
        loan: Loan | None = None,
        shared_bytes: int = 4 * 2**30,
        meeting: Meeting | None = None,
        token: str | None = None,
        files: Sequence[Path] | None = (),
    ) -> None:
        """port 0 takes any free one; threads 0 leaves torch's number as it is. loan: see Worker.

        token: what clients must know; without one the server listens on loopback alone, or raises ConfigError. files:
        folders that requests may name files of; None = any, where the one client is the process that started this.

        shared_bytes: most shared memory for answers to clients of this host; 0 = none. meeting: of an engine of several
        ranks, of which this is the first.
        """
        check_exposed(host, token, key="engine.host")
        self._token, self._files = token, files
        self._folder, self._dtype, self._device = folder, dtype, torch.device(device)
        self._fp32_modules = fp32_modules
        self._compiled = compiled
        self._host, self._port = host, port
        self._deterministic, self._threads = deterministic, threads
        self._prompt_cache_bytes = prompt_cache_bytes
        self._loan = loan
        self._meeting = meeting
        self._limits = {"max_batch": max_batch, "queue_size": queue_size}
        self._request_timeout_s = request_timeout_s
        self._pool = BlockPool(shared_bytes, device=self._device) if shared_bytes and supported() else None
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._server: uvicorn.Server | None = None
        self._batcher: Batcher | None = None
        self._failure: BaseException | None = None

    @property
    def url(self) -> str:
        """Known once the port is bound."""
        if self._socket is None:
            raise EngineError("the engine server is not started, so it has no address yet")
        return url_of(self._socket)

    @property
    def progress(self) -> int:
        """Of its batcher."""
        return 0 if self._batcher is None else self._batcher.progress

    def start(self) -> None:
        """Bind and serve from a background thread; the model loads meanwhile (`wait_ready`).

        Raises ConfigError when the port or the address cannot be had.
        """
        self._socket = listen(self._host, self._port, keys="engine.{}")
        self._thread = threading.Thread(target=self._serve, name="verst-engine-http", daemon=True)
        self._thread.start()

    def serve_forever(self) -> None:
        """Bind and serve from this, the main thread, until SIGINT or SIGTERM.

        Raises ModelError for a folder without a model, ConfigError like `start`, and EngineError as soon as the engine is
        dead: whoever supervises the process shall see its end.
        """
        recognise(self._folder, fp32_modules=self._fp32_modules)
        self._socket = listen(self._host, self._port, keys="engine.{}")
        print(f"{self._folder} is served at {self.url}", flush=True)
        self._serve(until_failure=True)
        if self._failure is not None:
            raise EngineError(f"the engine ended: {self._failure}") from self._failure

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Returns when the model is loaded. Raises EngineError when it cannot be, or not in time."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            batcher = self._batcher
            if batcher is not None and batcher.failure is not None:
                raise EngineError(f"the engine could not start: {batcher.failure}")
            if batcher is not None and batcher.state != "loading":
                return
            if self._thread is not None and not self._thread.is_alive():
                raise EngineError("the engine's server thread ended while it was starting")
            time.sleep(0.01)
        raise EngineError(f"the engine did not load {self._folder} in {timeout_s} s")

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop serving, after at most one more denoising step. Twice is no fault."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise EngineError(f"the engine's server thread did not end in {timeout_s} s")
            self._thread = None
        if self._socket is not None:
            self._socket.close()
        if self._pool is not None:
            self._pool.close()
        if self._batcher is not None and self._meeting is not None:
            # Else ranks that meet again in this process would find half of the old group.
            self._batcher.wait_closed(timeout_s)

    def _serve(self, *, until_failure: bool = False) -> None:
        assert self._socket is not None
        config = uvicorn.Config(
            self._app(until_failure=until_failure),
            log_level="warning",
            lifespan="on",
            timeout_graceful_shutdown=5,
            # Longer than clients keep idle connections, so that none is closed under a request.
            timeout_keep_alive=75,
        )
        self._server = uvicorn.Server(config)
        self._server.run(sockets=[self._socket])

    def _app(self, *, until_failure: bool) -> Starlette:
        batcher = Batcher(
            self._load,
            deterministic=self._deterministic,
            request_timeout_s=self._request_timeout_s,
            **self._limits,
        )
        self._batcher = batcher
        info = {
            "version": verst.__version__,
            "torch": torch.__version__,
            "model_path": str(self._folder),
            "dtype": str(self._dtype).removeprefix("torch."),
            "device": str(self._device),
            "deterministic": self._deterministic,
            "host": host_identity(),
            "ranks": 1 if self._meeting is None else self._meeting.size,
            **self._limits,
        }

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled() or task.exception() is None:
                return
            self._failure = task.exception()
            _log.error("the engine ended", exc_info=self._failure)
            if until_failure and self._server is not None:
                self._server.should_exit = True

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            task = asyncio.create_task(batcher.run(), name="verst-engine-batcher")
            task.add_done_callback(ended)
            yield
            task.cancel()
            await asyncio.wait({task})

        return create_app(batcher, info=info, pool=self._pool, token=self._token, files=self._files, lifespan=lifespan)

    def _load(self) -> Worker:
        if self._threads > 0:
            torch.set_num_threads(self._threads)
        if self._deterministic:
            make_deterministic(self._device)
        options: dict[str, Any] = {
            "dtype": self._dtype,
            "device": self._device,
            "fp32_modules": self._fp32_modules,
            "compiled": self._compiled,
            "as_trained": self._deterministic,
            "prompt_cache_bytes": self._prompt_cache_bytes,
        }
        if self._meeting is None:
            return Worker(self._folder, loan=self._loan, **options)
        return LeadWorker(self._folder, ranks=EngineRanks(self._meeting, device=self._device), **options)
