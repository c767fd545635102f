"""A server's process: launched here and ended with us, or somebody else's."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Protocol

import torch

from verst.engine.sglang import guard
from verst.engine.sglang.contract import SglangClient
from verst.engine.sglang.families import Pipeline
from verst.errors import ConfigError, EngineError

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NOT_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "VERST_TOKEN")
"""Ours alone: another Python's modules, and a secret."""
_LOG_BYTES = 64 * 2**10


class ServerProcess(Protocol):
    """Where the server is, and how it begins again."""

    url: str
    launched: bool
    """By us: it may be ended and started again."""

    def start(self) -> None:
        """Returns when it answers. Raises EngineError with its last words."""

    def last_words(self) -> str:
        """Of its log; "" where that is not ours."""

    def close(self) -> None:
        """Twice is no fault."""


class Running:
    """One that somebody else started and will end."""

    launched = False

    def __init__(self, url: str) -> None:
        self.url = url

    def start(self) -> None:
        client = SglangClient(self.url, timeout_s=10.0)
        try:
            if not client.healthy():
                raise EngineError(
                    f"engine.urls: nothing that is ready answers at {self.url}/health; start the server first"
                )
        finally:
            client.close()

    def last_words(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing of ours."""


class Launched:
    """One that is started here, on loopback, and dies with this process."""

    launched = True

    def __init__(
        self,
        folder: Path,
        pipeline: Pipeline,
        *,
        executable: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        dtype: torch.dtype,
        device: Literal["cpu", "cuda"],
        threads: int,
        start_s: float,
        log: Path,
    ) -> None:
        """threads: of torch, 0 = its own choice. log: file that is added to."""
        self._folder, self._pipeline, self._executable = folder, pipeline, executable
        self._arguments, self._environment = tuple(arguments), dict(environment)
        self._dtype, self._device, self._threads, self._start_s = dtype, device, threads, start_s
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        check_executable(self._executable)
        self.close()
        port, scheduler, master = _free_ports()
        self.url = f"http://127.0.0.1:{port}"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, guard.__file__, *self._command(port, scheduler, master)],
                env=self._variables(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait()

    def _command(self, port: int, scheduler: int, master: int) -> list[str]:
        precision = _PRECISIONS[self._dtype]
        # All parallel degrees, since with two GPUs in sight the server else cuts the guidance by itself; dynamic LoRA is
        # the form that a trainer computes with; attention by torch, whose kernels the trainer has as well.
        return [
            *(self._executable, "serve", "--model-path", str(self._folder), "--model-id", self._pipeline.model_id),
            *(
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--scheduler-port",
                str(scheduler),
                "--master-port",
                str(master),
            ),
            *("--num-gpus", "1", "--tp-size", "1", "--sp-degree", "1", "--ulysses-degree", "1", "--ring-degree", "1"),
            *("--dp-size", "1", "--cfg-parallel-size", "1", "--batching-max-size", "1", "--warmup-mode", "off"),
            *("--attention-backend", "torch_sdpa", "--lora-merge-mode", "dynamic", "--dit-precision", precision),
            *("--text-encoder-precisions", *[precision] * self._pipeline.text_encoders),
            *self._arguments,
        ]

    def _variables(self) -> dict[str, str]:
        variables = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
        variables["HF_HUB_OFFLINE"] = "1"
        if self._device == "cpu":
            variables["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cpu"
        if self._threads:
            variables["OMP_NUM_THREADS"] = str(self._threads)
        return variables | self._environment

    def _wait(self) -> None:
        assert self._process is not None
        client = SglangClient(self.url, timeout_s=5.0)
        end = time.monotonic() + self._start_s
        try:
            while time.monotonic() < end:
                if self._process.poll() is not None:
                    raise EngineError(f"SGLang's server ended while it started.{self.last_words()}")
                if client.healthy():
                    return
                time.sleep(0.2)
        finally:
            client.close()
        self.close()
        raise EngineError(f"SGLang's server did not start in {self._start_s:g} s (engine.start_s).{self.last_words()}")

    def last_words(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _LOG_BYTES))
                lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        return f" Its log, {self._log}, ends with:\n" + "\n".join(lines[-12:])

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        # The guard's word that nobody wants the server any more.
        self._process.stdin.close()
        self._process.wait()
        self._process = None


def check_executable(name: str) -> None:
    """Raises ConfigError where there is no such command."""
    if shutil.which(name) is None:
        raise ConfigError(
            f"engine.executable = {name!r} is no command here: install sglang[diffusion] into an environment of its own and "
            "name the path of its `sglang`, or name running servers in engine.urls (docs/sglang.md)"
        )


def _free_ports() -> tuple[int, int, int]:
    """For HTTP, whose next number the server takes as well; for its scheduler; for its ranks. All are held until the last is
    found."""
    with ExitStack() as held:

        def take(port: int = 0) -> int:
            sock = held.enter_context(socket.socket())
            sock.bind(("127.0.0.1", port))
            return int(sock.getsockname()[1])

        while True:
            http = take()
            try:
                take(http + 1)
            except (OSError, OverflowError):
                continue
            return http, take(), take()
