"""The router under load: no error, and memory that does not grow.

python benchmarks/router.py [--requests 10000] [--concurrent 64] [--large-bytes 1073741824] [--out FILE]

`verst router` as a process of its own, two engines without a model as two more, over real HTTP. The clients are in this
process. Three parts, one after the other:

    many        requests for samples, `concurrent` at a time, 64 KiB each: errors, seconds, the router's memory
    disturbed   the same with a fifth of the requests, while one engine is killed and started again in the middle
    large       16 answers of `large-bytes` at a time, all of which the router passes on: its memory above that of idle

Memory is the router's resident set, read every tenth of a second. Load of the machine moves the seconds, not the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PREDICTION = {"errors": 0, "grown_mb": 8.0, "above_idle_mb": 64.0}
"""grown_mb: from the first tenth of the requests to the last; above_idle_mb: with 16 large answers under way."""
SMALL_BYTES = 64 * 2**10
LARGE_AT_A_TIME = 16
PIECE = bytes(512 * 2**10)
WEIGHTS = 3


def engine(port: int) -> None:
    """An engine that answers zeros at once: as many as `bytes` of the request says."""

    async def generate(request: Request) -> Response:
        nbytes = json.loads(await request.body())["bytes"]
        headers = {"verst-weight-version": str(WEIGHTS), "content-length": str(nbytes)}

        async def pieces() -> AsyncIterator[bytes | memoryview]:
            for start in range(0, nbytes, len(PIECE)):
                yield memoryview(PIECE)[: nbytes - start]

        return StreamingResponse(pieces(), media_type="application/msgpack", headers=headers)

    async def info(request: Request) -> Response:
        return JSONResponse({"status": "ok", "weight_version": WEIGHTS, "queue_size": 64})

    routes = [
        Route("/rollout/generate", generate, methods=["POST"]),
        Route("/health", info),
        Route("/server_info", info),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="error")


class Memory:
    """Resident bytes of a process over time, and its seconds of computing, which other processes' load does not change."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.readings: list[int] = []

    def now(self) -> int:
        return int(self._process.memory_info().rss)

    def cpu_s(self) -> float:
        """Seconds that it has computed."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    async def watch(self) -> None:
        """Until cancelled."""
        self.readings = []
        while True:
            self.readings.append(self.now())
            await asyncio.sleep(0.1)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def begin(port: int) -> mp.Process:
    process = mp.get_context("spawn").Process(target=engine, args=(port,), daemon=True)
    process.start()
    return process


@contextmanager
def router(ports: list[int]) -> Iterator[tuple[str, int]]:
    """(URL, process id) of a `verst router` before the engines."""
    options = [word for port in ports for word in ("--engines", f"http://127.0.0.1:{port}")]
    command = [sys.executable, "-m", "verst.cli.main", "router", "--port", "0", "--per-engine", "32", *options]
    process = subprocess.Popen([*command, "--probe-s", "0.2"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process.pid
    finally:
        process.terminate()
        process.wait()


async def ready(http: httpx.AsyncClient, number: int) -> None:
    while sum(row["state"] == "ready" for row in (await http.get("/engines")).json()) < number:
        await asyncio.sleep(0.1)


async def ask(http: httpx.AsyncClient, nbytes: int, seed: int) -> str | None:
    """What is wrong with the answer to one request; None = nothing."""
    body = {"prompt": "1234", "seeds": [seed], "height": 512, "width": 512 + 256 * (seed % 3), "bytes": nbytes}
    received = 0
    headers = {"verst-weight-version": str(WEIGHTS)}
    try:
        async with http.stream("POST", "/rollout/generate", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code} {(await answer.aread())[:200]!r}"
            async for piece in answer.aiter_raw():
                received += len(piece)
    except httpx.TransportError as error:
        return repr(error)
    made_by = answer.headers["verst-weight-version"]
    if received != nbytes or made_by != str(WEIGHTS):
        return f"{received} bytes of {nbytes}, weights {made_by}"
    return None


async def load(http: httpx.AsyncClient, *, requests: int, at_a_time: int, nbytes: int) -> dict[str, Any]:
    numbers = iter(range(requests))
    errors: list[str] = []
    seconds: list[float] = []

    async def client() -> None:
        for number in numbers:
            start = time.perf_counter()
            problem = await ask(http, nbytes, number)
            seconds.append(time.perf_counter() - start)
            if problem is not None:
                errors.append(problem)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_a_time)))
    total = time.perf_counter() - start
    return {
        "requests": requests,
        "at_a_time": at_a_time,
        "bytes_each": nbytes,
        "errors": len(errors),
        "first_errors": errors[:3],
        "seconds": total,
        "requests_per_s": requests / total,
        "gb_per_s": requests * nbytes / total / 1e9,
        "median_s": statistics.median(seconds),
        "p99_s": sorted(seconds)[int(0.99 * len(seconds))],
    }


async def measured(http: httpx.AsyncClient, memory: Memory, **what: Any) -> dict[str, Any]:
    idle, worked = memory.now(), memory.cpu_s()
    watch = asyncio.create_task(memory.watch())
    result = await load(http, **what)
    watch.cancel()
    readings = memory.readings
    tenth = max(1, len(readings) // 10)
    first, last = statistics.median(readings[:tenth]), statistics.median(readings[-tenth:])
    return {
        **result,
        "router_cpu_ms_each": 1000 * (memory.cpu_s() - worked) / result["requests"],
        "idle_mb": idle / 2**20,
        "peak_mb": max(readings) / 2**20,
        "above_idle_mb": (max(readings) - idle) / 2**20,
        "grown_mb": (last - first) / 2**20,
    }


async def disturbed(
    http: httpx.AsyncClient, memory: Memory, engines: list[mp.Process], ports: list[int], **what: Any
) -> dict[str, Any]:
    async def disturb() -> None:
        await asyncio.sleep(1.0)
        engines[0].kill()
        await asyncio.sleep(1.5)
        engines[0] = begin(ports[0])

    trouble = asyncio.create_task(disturb())
    result = await measured(http, memory, **what)
    await trouble
    await ready(http, 2)
    rows = (await http.get("/engines")).json()
    return {
        **result,
        "quarantines": sum(row["quarantines"] for row in rows),
        "in_service_after": sum(row["state"] == "ready" for row in rows),
    }


async def run(url: str, pid: int, engines: list[mp.Process], ports: list[int], given: Any) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=given.concurrent)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=600, limits=limits) as http:
        memory = Memory(pid)
        await ready(http, len(ports))
        small = {"at_a_time": given.concurrent, "nbytes": SMALL_BYTES}
        await load(http, requests=200, **small)  # so that idle is after its first work
        results = {"many": await measured(http, memory, requests=given.requests, **small)}
        report(results["many"], "many")
        results["disturbed"] = await disturbed(http, memory, engines, ports, requests=given.requests // 5, **small)
        report(results["disturbed"], "disturbed")
        results["large"] = await measured(
            http, memory, requests=LARGE_AT_A_TIME, at_a_time=LARGE_AT_A_TIME, nbytes=given.large_bytes
        )
        report(results["large"], "large")
        return results


def report(result: dict[str, Any], name: str) -> None:
    shown = (
        "errors",
        "seconds",
        "requests_per_s",
        "gb_per_s",
        "p99_s",
        "router_cpu_ms_each",
        "peak_mb",
        "above_idle_mb",
        "grown_mb",
    )
    print(f"{name:10}", *(f"{key} {result[key]:.4g}" for key in shown), flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--requests", type=int, default=10_000)
    arguments.add_argument("--concurrent", type=int, default=64)
    arguments.add_argument("--large-bytes", type=int, default=2**30)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "router.json")
    given = arguments.parse_args()
    before = os.getloadavg()
    ports = [free_port(), free_port()]
    engines = [begin(port) for port in ports]
    try:
        with router(ports) as (url, pid):
            results = asyncio.run(run(url, pid, engines, ports, given))
    finally:
        for process in engines:
            process.kill()
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("httpx", "starlette", "uvicorn", "h11")},
        "load_average": [before, os.getloadavg()],
        "prediction": PREDICTION,
        **results,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
