"""SGLang-Diffusion as an oracle: its unpacked wheel, and its real server on a tiny SD3, from build/sglang.

`make test-sglang` builds both. Without them, and in a plain `make test` for the server, these tests are skipped.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from verst.families.tiny import build_tiny

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "sglang"
START_S = 300


@dataclass(frozen=True, kw_only=True)
class Sglang:
    url: str
    folder: Path
    """The checkpoint that it serves."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for = "sglang" in config.option.markexpr
    for item in items:
        if "sglang_wheel" in getattr(item, "fixturenames", ()) and not (BUILT / "wheel" / "sglang").is_dir():
            item.add_marker(pytest.mark.skip(reason="no SGLang wheel is unpacked: make test-sglang"))
        if {"sglang_server", "sglang_installed"} & set(getattr(item, "fixturenames", ())):
            if not (BUILT / "venv" / "bin" / "sglang").exists():
                item.add_marker(pytest.mark.skip(reason="SGLang's server is not installed: make test-sglang"))
            elif not asked_for:
                item.add_marker(pytest.mark.skip(reason="SGLang's server takes a minute to start: make test-sglang"))


@pytest.fixture(scope="session")
def sglang_wheel() -> Path:
    return BUILT / "wheel"


@pytest.fixture(scope="session")
def sglang_installed() -> None:
    """Its tests start servers of their own."""


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    """The real server in fp32 on one thread: equal bits need the same number of threads on both sides."""
    folder = build_tiny("sd3.5", tmp_path_factory.mktemp("sglang") / "sd3")
    log = tmp_path_factory.mktemp("sglang-log") / "server.log"
    url = f"http://127.0.0.1:{_free_port()}"
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                *(BUILT / "venv" / "bin" / "sglang", "serve", "--model-path", folder),
                *("--model-id", "stable-diffusion-3.5-medium", "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1]),
                *("--warmup-mode", "off", "--attention-backend", "torch_sdpa"),
                *("--dit-precision", "fp32", "--text-encoder-precisions", "fp32", "fp32", "fp32"),
            ],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).with_name("site")),
                "SGLANG_DIFFUSION_PLATFORM_OVERRIDE": "cpu",
                "HF_HUB_OFFLINE": "1",
            },
            cwd=folder.parent,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, url, log)
        yield Sglang(url=url, folder=folder)
    finally:
        # Its workers are children in the session that was started for it, and nothing else is.
        for number in (signal.SIGTERM, signal.SIGKILL):
            _signal_group(process.pid, number)
            if number == signal.SIGTERM:
                _wait(process, seconds=20)
        process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"SGLang's server did not start:\n{log.read_text()[-4000:]}")


def _wait(process: subprocess.Popen[bytes], *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
