"""Engines without a model, behind the real wire: HTTP servers that answer rollout requests after a fixed time.

Every engine has a port, a pool of shared blocks and one place: a request waits for those before it, as in a real engine
that makes one microgroup a batch. Each lives in a process of its own. What they answer is complete (latents,
log-probs, conditioning, frames, echo) and of a size of your choice; only its values mean nothing.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import multiprocessing as mp
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from verst.engine.blocks import BlockPool
from verst.engine.transport import Accepted, ship
from verst.engine.wire import GenerateRequest
from verst.web.timing import HEADER, Stopwatch
from verst.weights.block import host_identity

WEIGHT_VERSION = 0


@dataclass(frozen=True, kw_only=True)
class FakeEngineOptions:
    number: int
    latency_s: float
    """Of one microgroup."""
    latent: tuple[int, ...]
    """Of one sample at one step, fp32."""
    frames: tuple[int, int, int, int]
    """uint8 [F, H, W, 3] of one sample."""
    shared_bytes: int
    """Of each engine; 0: none."""


class FakeEngines:
    """The processes; use as a context manager."""

    def __init__(self, options: FakeEngineOptions) -> None:
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(options.number)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [context.Process(target=_serve, args=(theirs, options), daemon=True) for _, theirs in pipes]

    def __enter__(self) -> FakeEngines:
        for process in self._processes:
            process.start()
        self.urls = [f"http://127.0.0.1:{pipe.recv()}" for pipe in self._pipes]
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)


class _Engine:
    def __init__(self, options: FakeEngineOptions) -> None:
        self._options = options
        self._pool = BlockPool(options.shared_bytes) if options.shared_bytes else None
        self._place = asyncio.Semaphore(1)
        self._batches = 0
        self._record = functools.lru_cache(_record)

    def app(self) -> Starlette:
        routes = [
            Route("/rollout/generate", self.generate, methods=["POST"]),
            Route("/server_info", self.server_info, methods=["GET"]),
        ]
        return Starlette(routes=routes)

    async def server_info(self, request: Request) -> Response:
        shared = {} if self._pool is None else {"shared_memory": {}}
        return JSONResponse({"host": host_identity(), "weight_version": WEIGHT_VERSION, **shared})

    async def generate(self, request: Request) -> Response:
        watch = Stopwatch()
        asked = GenerateRequest.model_validate_json(await request.body())
        put_s = time.perf_counter()
        async with self._place:
            begun_s = time.perf_counter()
            await asyncio.sleep(self._options.latency_s)
            made_s = time.perf_counter()
            watch.batch = self._batches = self._batches + 1
        shipment = ship(self._samples(asked), Accepted.of(request.headers), self._pool)
        ends = (put_s, begun_s, made_s, time.perf_counter())
        for stage, (start_s, end_s) in zip(("queue", "denoise", "ship"), itertools.pairwise(ends), strict=True):
            watch.add(stage, start_s, end_s)
        response = shipment.response()
        response.headers[HEADER] = watch.header()
        return response

    def _samples(self, asked: GenerateRequest) -> list[dict[str, Any]]:
        count, seeds = asked.num_samples, asked.sample_seeds()
        steps, kept = asked.rollout_sde_step_indices or (), asked.rollout_return_step_indices or ()
        initial = list(asked.initial_seeds or seeds)
        echo = {
            **asked.model_dump(mode="json"),
            "seeds": list(seeds),
            "initial_seeds": initial,
            "prompts": [asked.prompt] * count,
            "num_outputs_per_prompt": count,
            "truncated_prompts": 0,
            "weight_version": WEIGHT_VERSION,
        }
        made = self._record(self._options, asked.num_inference_steps or 1, tuple(kept))
        env = {
            "image_kwargs": {"height": self._options.frames[1], "width": self._options.frames[2]},
            "pos_cond_kwargs": {"prompt_embeds": torch.zeros(1, 16, 64)},
            "neg_cond_kwargs": None,
            "guidance": None,
        }
        return [
            {
                "prompt": asked.prompt,
                "seed": seeds[row],
                "initial_seed": initial[row],
                "generated_output": None,
                **made,
                "denoising_env": env if row == 0 and asked.rollout_return_denoising_env else None,
                "echo": {**echo, "rollout_sde_step_indices": list(steps)},
                "weight_version": WEIGHT_VERSION,
            }
            for row in range(count)
        ]


def _record(options: FakeEngineOptions, num_steps: int, kept: tuple[int, ...]) -> dict[str, Any]:
    """What all samples of one sampling have in common."""
    sigmas = torch.linspace(1.0, 0.0, num_steps + 1)
    indices = torch.tensor(kept, dtype=torch.int64)
    trajectory = {
        "latents": torch.zeros(len(kept), *options.latent),
        "latent_step_indices": indices,
        "timesteps": 1000 * sigmas[indices],
        "grid_timesteps": 1000 * sigmas,
        "sigmas": sigmas,
    }
    return {
        "media": torch.full(options.frames, 128, dtype=torch.uint8),
        "audio": None,
        "sample_rate": None,
        "fps": None,
        "stream": "visual",
        "rollout_log_probs": torch.zeros(num_steps),
        "rollout_debug_tensors": None,
        "dit_trajectory": trajectory,
        "extra_streams": {},
    }


def _serve(pipe: Connection, options: FakeEngineOptions) -> None:
    torch.set_num_threads(1)
    asyncio.run(serve_until_told(_Engine(options).app(), pipe))


async def serve_until_told(app: Starlette, pipe: Connection) -> None:
    """On a free port, which goes through the pipe; whatever comes back ends it."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", port=0, timeout_keep_alive=75))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    pipe.send(server.servers[0].sockets[0].getsockname()[1])
    await asyncio.to_thread(pipe.recv)
    server.should_exit = True
    await task
