"""How samples come from an engine to the driver: every way against the floor (memcpy) and the baseline (JSON, base64).

python benchmarks/transport.py [--sizes image,clip,video] [--repeats 3] [--out FILE]
python benchmarks/transport.py --device cuda [--out FILE]

Three processes as in a run: an engine with an HTTP server, the driver with its event loop, a parser. A microgroup is 4
samples, each with 9 fp32 latents and its uint8 frames; `video` is 684 MB. For each way, one at a time:

    end to end   from the request until the driver has every tensor (median); encode is the engine's part of it
    loop held    longest time for which the driver's event loop did nothing else: by the clock, with the machine's noise
                 (`idle_loop_held_s`), and in the thread's own CPU time
    memory       peak of the proportional set sizes of all three, above what they held before the first answer

With --device cuda: from the GPU into a page-locked pooled block, against a copy into page-locked memory of torch's own
and against the base64 chain, all in this process. Load of the machine moves every figure: compare ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing as mp
import os
import platform
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch
import torch
from fake_engines import serve_until_told
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verst.engine.blocks import BlockPool, TensorHandle, handle_of, open_tensor
from verst.engine.transport import Accepted, receive, ship
from verst.engine.wire import Answer, decode_response, share_response

SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "image": ((9, 16, 64, 64), (1, 512, 512, 3)),
    "clip": ((9, 16, 9, 60, 104), (33, 480, 832, 3)),
    "video": ((9, 128, 16, 16, 24), (121, 512, 768, 3)),
}
"""Latents and frames of one sample."""
NUM_SAMPLES = 4
POOL_BYTES = 3 * 2**30
PREDICTION = {
    "msgpack_pool_over_json_base64": 1.8,
    "shm_over_json_base64": 20.0,
    "shm_over_memcpy": 0.5,
    "shm_loop_held_s": 0.01,
    "shm_extra_memory_over_payload": 1.1,
}
"""What was written down before the first measurement: ratios of rates are at least these, the last two at most."""
CUDA_PREDICTION = {"block_over_pinned": 0.8, "block_over_json_base64": 100.0}
Records = list[dict[str, Any]]
Run = Callable[[httpx.AsyncClient], Awaitable[tuple[Records, float]]]
"""The tensors in the driver, and the seconds that the engine encoded."""


def samples(size: str, device: str = "cpu") -> Records:
    latents, frames = SIZES[size]
    generator = torch.Generator(device).manual_seed(0)
    return [
        {
            "latents": torch.randn(latents, generator=generator, device=device),
            "media": torch.randint(0, 256, frames, generator=generator, device=device, dtype=torch.uint8),
        }
        for _ in range(NUM_SAMPLES)
    ]


def tensors_of(records: Records) -> list[torch.Tensor]:
    return [tensor for record in records for tensor in record.values()]


def payload_bytes(records: Records) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(records))


def to_json(records: Records) -> bytes:
    """The baseline's body: every tensor as base64 of a safetensors file, in JSON."""

    def text(tensor: torch.Tensor) -> str:
        return base64.b64encode(safetensors.torch.save({"t": tensor.cpu()})).decode()

    return json.dumps([{name: text(tensor) for name, tensor in record.items()} for record in records]).encode()


def from_json(body: bytes) -> Records:
    return [
        {name: safetensors.torch.load(base64.b64decode(text))["t"] for name, text in record.items()}
        for record in json.loads(body)
    ]


def engine(pipe: Connection, size: str) -> None:
    """The engine's process: answers what its samples are, in the way that is asked for."""
    records, pool = samples(size), BlockPool(POOL_BYTES)

    async def generate(request: Request) -> Response:
        started = time.perf_counter()
        if request.headers["way"] == "json_base64":
            response = Response(await asyncio.to_thread(to_json, records), media_type="application/json")
        else:
            shipment = await asyncio.to_thread(ship, records, Accepted.of(request.headers), pool)
            response = shipment.response()
        response.headers["encode-s"] = str(time.perf_counter() - started)
        return response

    asyncio.run(serve_until_told(Starlette(routes=[Route("/", generate, methods=["POST"])]), pipe))


def parser(pipe: Connection) -> None:
    """The parser's process: handles in, handles out."""
    while (sent := pipe.recv()) is not None:
        body, shared = sent
        opened = body if isinstance(body, bytes) else open_tensor(body)
        records = decode_response(Answer(body=opened, shared=None if shared is None else open_tensor(shared)))
        pipe.send([{name: lent(tensor) for name, tensor in record.items()} for record in records])


def lent(tensor: torch.Tensor) -> TensorHandle:
    handle = handle_of(tensor)
    assert handle is not None, "the answer does not lie in a block"
    return handle


class Driver:
    """The three processes, and one method a way."""

    def __init__(self, size: str) -> None:
        context = mp.get_context("spawn")
        self._engine, theirs = context.Pipe()
        self._parser, parsers = context.Pipe()
        targets: list[tuple[Any, tuple[Any, ...]]] = [(engine, (theirs, size)), (parser, (parsers,))]
        self._processes = [context.Process(target=f, args=args, daemon=True) for f, args in targets]
        for process in self._processes:
            process.start()
        self.url = f"http://127.0.0.1:{self._engine.recv()}"
        self._pool = BlockPool(POOL_BYTES)

    @property
    def pids(self) -> list[int]:
        return [os.getpid(), *(process.pid or 0 for process in self._processes)]

    def close(self) -> None:
        self._engine.send(None)
        self._parser.send(None)
        for process in self._processes:
            process.join(20)
        self._pool.close()

    async def json_base64(self, http: httpx.AsyncClient) -> tuple[Records, float]:
        response = await http.post("/", headers={"way": "json_base64"})
        return from_json(response.content), float(response.headers["encode-s"])

    async def msgpack_loop(self, http: httpx.AsyncClient) -> tuple[Records, float]:
        answer, encode_s = await self._answer(http, Accepted(), None)
        return decode_response(answer), encode_s

    async def msgpack_pool(self, http: httpx.AsyncClient) -> tuple[Records, float]:
        answer, encode_s = await self._answer(http, Accepted(), self._pool)
        return await self._parsed(answer), encode_s

    async def shm(self, http: httpx.AsyncClient) -> tuple[Records, float]:
        answer, encode_s = await self._answer(http, Accepted(shared=True), self._pool)
        assert answer.shared is not None
        return await self._parsed(answer), encode_s

    async def _answer(
        self, http: httpx.AsyncClient, accepted: Accepted, pool: BlockPool | None
    ) -> tuple[Answer, float]:
        async with http.stream("POST", "/", headers={"way": "ours", **accepted.headers()}) as response:
            return await receive(response, pool), float(response.headers["encode-s"])

    async def _parsed(self, answer: Answer) -> Records:
        body = answer.body if isinstance(answer.body, bytes) else lent(answer.body)
        self._parser.send((body, None if answer.shared is None else lent(answer.shared)))
        handles = await asyncio.to_thread(self._parser.recv)
        return [{name: open_tensor(handle) for name, handle in record.items()} for record in handles]


class Ticker:
    """Wakes every millisecond; the longest between two times, by the clock and in this thread's own work."""

    async def __aenter__(self) -> Ticker:
        self.wall_s = self.cpu_s = 0.0
        self._task = asyncio.create_task(self._run())
        await asyncio.sleep(0.05)
        self.wall_s = self.cpu_s = 0.0
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            self.wall_s = max(self.wall_s, time.perf_counter() - wall - 0.001)
            self.cpu_s = max(self.cpu_s, time.thread_time() - cpu)


class PeakMemory:
    """Samples the proportional set sizes of processes from a thread."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self.start_bytes = self.peak_bytes = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, self._now())

    def _watch(self) -> None:
        while not self._ended.wait(0.03):
            self.peak_bytes = max(self.peak_bytes, self._now())

    def _now(self) -> int:
        lines = [line for pid in self._pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


async def measure(run: Run, driver: Driver, expected: list[float], repeats: int) -> dict[str, float]:
    """One answer for the memory, which also fills the pools, then `repeats` for the times."""
    http = httpx.AsyncClient(base_url=driver.url, timeout=300, trust_env=False)
    with PeakMemory(driver.pids) as memory:
        records, _ = await run(http)
    assert [float(t.reshape(-1)[::997].double().sum()) for t in tensors_of(records)] == expected
    totals, encodes, held, busy = [], [], [], []
    for _ in range(repeats):
        del records
        async with Ticker() as ticker:
            started = time.perf_counter()
            records, encode_s = await run(http)
            totals.append(time.perf_counter() - started)
            await asyncio.sleep(0.01)
        held.append(ticker.wall_s)
        busy.append(ticker.cpu_s)
        encodes.append(encode_s)
    await http.aclose()
    started = time.perf_counter()
    for tensor in tensors_of(records):
        tensor.view(torch.uint8).max()
    read_s = time.perf_counter() - started
    nbytes = payload_bytes(records)
    total, encode = statistics.median(totals), statistics.median(encodes)
    return {
        "end_to_end_s": total,
        "encode_s": encode,
        "receive_and_decode_s": total - encode,
        "gb_per_s": nbytes / total / 1e9,
        "loop_held_s": statistics.median(held),
        "loop_held_cpu_s": statistics.median(busy),
        "extra_memory_over_payload": (memory.peak_bytes - memory.start_bytes) / nbytes,
        "read_once_s": read_s,
    }


def memcpy_seconds(nbytes: int, repeats: int = 5) -> float:
    """One copy between two buffers whose pages are there, by as many threads as torch uses."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return statistics.median(timed(lambda: target.copy_(source)) for _ in range(repeats))


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def on_cpu(size: str, repeats: int) -> dict[str, Any]:
    expected = [float(t.reshape(-1)[::997].double().sum()) for t in tensors_of(samples(size))]
    nbytes = payload_bytes(samples(size))
    driver = Driver(size)
    result: dict[str, Any] = {"payload_mb": nbytes / 1e6, "memcpy_gb_per_s": nbytes / memcpy_seconds(nbytes) / 1e9}
    ways: dict[str, Run] = {
        "shm": driver.shm,
        "msgpack_pool": driver.msgpack_pool,
        "msgpack_loop": driver.msgpack_loop,
        "json_base64": driver.json_base64,
    }
    idle = asyncio.run(idle_lag())
    for name, run in ways.items():
        times = 1 if name == "json_base64" and nbytes > 2e8 else repeats
        result[name] = asyncio.run(measure(run, driver, expected, times))
        print(f"{size:6} {name:13} {json.dumps({k: float(f'{v:.3g}') for k, v in result[name].items()})}", flush=True)
    driver.close()
    # Again, since the load may have changed meanwhile: the mean of both stands for the floor.
    result["memcpy_gb_per_s"] = (result["memcpy_gb_per_s"] + nbytes / memcpy_seconds(nbytes) / 1e9) / 2
    result["idle_loop_held_s"] = idle
    base = result["json_base64"]["end_to_end_s"]
    result["ratios"] = {
        "msgpack_pool_over_json_base64": base / result["msgpack_pool"]["end_to_end_s"],
        "shm_over_json_base64": base / result["shm"]["end_to_end_s"],
        "shm_over_memcpy": result["shm"]["gb_per_s"] / result["memcpy_gb_per_s"],
        "shm_loop_held_s": result["shm"]["loop_held_s"],
        "shm_loop_held_cpu_s": result["shm"]["loop_held_cpu_s"],
        "shm_extra_memory_over_payload": result["shm"]["extra_memory_over_payload"],
    }
    return result


async def idle_lag() -> float:
    """What the measure shows of a loop that nothing holds: the machine's own noise."""
    async with Ticker() as ticker:
        await asyncio.sleep(1.0)
    return ticker.wall_s


def on_cuda(size: str, repeats: int) -> dict[str, Any]:
    """Device to host alone, in this process."""
    records = samples(size, "cuda")
    nbytes = payload_bytes(records)
    flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors_of(records)])
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    pool = BlockPool(POOL_BYTES, device="cuda", unclaimed_s=0.0)

    def to_pinned() -> None:
        pinned.copy_(flat, non_blocking=True)
        torch.cuda.synchronize()

    def to_block() -> None:
        assert share_response(records, pool) is not None

    torch.cuda.synchronize()
    registered_s = timed(to_block)
    to_pinned()
    block = statistics.median(timed(to_block) for _ in range(repeats))
    floor = statistics.median(timed(to_pinned) for _ in range(repeats))
    pageable = statistics.median(timed(lambda: [t.cpu() for t in tensors_of(records)]) for _ in range(2))
    base = timed(lambda: from_json(to_json(records)))
    result = {
        "payload_mb": nbytes / 1e6,
        "first_block_s": registered_s,
        "block_gb_per_s": nbytes / block / 1e9,
        "pinned_gb_per_s": nbytes / floor / 1e9,
        "pageable_gb_per_s": nbytes / pageable / 1e9,
        "json_base64_gb_per_s": nbytes / base / 1e9,
        "ratios": {"block_over_pinned": floor / block, "block_over_json_base64": base / block},
    }
    pool.close()
    print(f"{size:6} {json.dumps(result)}", flush=True)
    return result


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--sizes", default="image,clip,video")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    cuda = given.device == "cuda"
    out = given.out or Path(__file__).parent / "results" / ("transport_cuda.json" if cuda else "transport.json")
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        "prediction": CUDA_PREDICTION if cuda else PREDICTION,
        "sizes": {},
    }
    for size in given.sizes.split(","):
        report["sizes"][size] = (on_cuda if cuda else on_cpu)(size, given.repeats)
        report["load_average_after"] = os.getloadavg()
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"{size:6} {json.dumps(report['sizes'][size]['ratios'])}", flush=True)


if __name__ == "__main__":
    main()
