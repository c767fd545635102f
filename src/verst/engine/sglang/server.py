"""The adapter's own server: an engine like any other to its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from verst.engine.server import EngineServer
from verst.engine.sglang.contract import Way
from verst.engine.sglang.families import pipeline_of
from verst.engine.sglang.process import Launched, Running, ServerProcess
from verst.engine.sglang.worker import ServerOptions, SglangWorker
from verst.engine.worker import Worker
from verst.families import recognise


class SglangEngineServer(EngineServer):
    """Launches a server of SGLang-Diffusion, or takes the one at `url`."""

    def __init__(
        self,
        folder: Path,
        *,
        url: str | None = None,
        executable: str = "sglang",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        server_device: Literal["cpu", "cuda"] = "cpu",
        start_s: float = 600.0,
        way: Way = "tensors",
        check_noise: bool = True,
        log: Path = Path("sglang.log"),
        **options: Any,
    ) -> None:
        """url: of a running server; the five after it are for one that is launched. options: of EngineServer."""
        super().__init__(folder, device="cpu", max_batch=1, **options)
        self._url, self._executable, self._arguments = url, executable, tuple(arguments)
        self._environment, self._server_device, self._start_s, self._log = environment, server_device, start_s, log
        self._options = ServerOptions(timeout_s=self._request_timeout_s, way=way, check_noise=check_noise)

    def stop(self, timeout_s: float = 30.0) -> None:
        """Returns when a launched server has ended, too."""
        super().stop(timeout_s)
        if self._batcher is not None:
            self._batcher.wait_closed(timeout_s)

    def _load(self) -> Worker:
        if self._threads > 0:
            torch.set_num_threads(self._threads)
        pipeline = pipeline_of(recognise(self._folder))
        server: ServerProcess
        if self._url is not None:
            server = Running(self._url)
        else:
            server = Launched(
                self._folder,
                pipeline,
                executable=self._executable,
                arguments=self._arguments,
                environment=self._environment or {},
                dtype=self._dtype,
                device=self._server_device,
                threads=self._threads,
                start_s=self._start_s,
                log=self._log,
            )
        return SglangWorker(self._folder, server, pipeline, dtype=self._dtype, options=self._options)
