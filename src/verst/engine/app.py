"""The HTTP endpoints: names and bodies of SGLang-Diffusion's, and ours for certified weights and prompt checks."""

from __future__ import annotations

import base64
import binascii
import functools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import StatelessLifespan

from verst.engine.batching import Batcher, Expired, OtherWeights
from verst.engine.blocks import BlockPool
from verst.engine.bodies import (
    Checksums,
    DiskUpdate,
    ManifestBody,
    PromptCheck,
    Release,
    RequestCheck,
    TensorCheck,
    TensorUpdate,
)
from verst.engine.files import check_files
from verst.engine.images import ConditionImages
from verst.engine.request import GenerateRequest, explain
from verst.engine.transport import Accepted, Shipment, ship
from verst.engine.worker import Unavailable
from verst.errors import ConfigError, ModelError, PromptError, RequestError, SyncError, VerstError
from verst.web.guard import Guard, Limits
from verst.web.listen import ClientGone, while_there
from verst.web.terms import Terms
from verst.web.timing import HEADER, Stopwatch
from verst.weights.manifest import Manifest

LIMITS = Limits(
    body_bytes_at={
        "/rollout/check_prompts": 512 * 2**20,
        "/rollout/check_requests": 512 * 2**20,
        "/update_weights_from_tensor": 8 * 2**30,
    }
)
"""Prompts of a whole run are checked at once, and weights may come in a request."""


class Endpoints:
    """Handlers over one batcher. `info` is what /server_info says besides counters; `pool` what answers may lie in."""

    def __init__(
        self, batcher: Batcher, info: dict[str, Any], pool: BlockPool | None, files: Sequence[Path] | None
    ) -> None:
        self._batcher = batcher
        self._files = files
        self._info = info
        self._pool = pool

    async def generate(self, request: Request) -> Response:
        watch = Stopwatch()
        body = await request.body()
        record = GenerateRequest.model_validate_json(body)
        check_files(record.merged().image_path or (), self._files, field="image_path")
        accepted = Accepted.of(request.headers)
        encode = functools.partial(ship, accepted=accepted, pool=self._pool)
        terms = Terms.of(request.headers)
        work = self._batcher.generate(record, terms=terms, encode=encode, watch=watch)
        try:
            shipment: Shipment = await while_there(work, request.receive)
        except ClientGone:
            return Response(status_code=499)
        response = shipment.response()
        response.headers[HEADER] = watch.header()
        return response

    async def check_prompts(self, request: Request) -> Response:
        body = PromptCheck.model_validate_json(await request.body())
        components = self._batcher.components
        length = body.max_sequence_length
        if length is None:
            length = components.family.sampling_defaults(components).max_sequence_length
        return JSONResponse(components.family.check_prompts(components, body.prompts, max_sequence_length=length))

    async def check_requests(self, request: Request) -> Response:
        """Why each of the requests would be refused, or null. Condition images are counted, not read."""
        body = RequestCheck.model_validate_json(await request.body())
        problems: list[str | None] = []
        for record in body.requests:
            try:
                self._batcher.resolve(record, images=ConditionImages())
            except (RequestError, PromptError) as error:
                problems.append(str(error))
            else:
                problems.append(None)
        return JSONResponse(problems)

    async def update_from_disk(self, request: Request) -> Response:
        body = DiskUpdate.model_validate_json(await request.body())
        check_files([body.model_path], self._files, field="model_path")
        modules = body.target_modules or ["transformer"]
        number = await self._batcher.control(
            lambda worker: worker.update_from_folder(body.model_path, modules=modules, version=body.weight_version)
        )
        return self._updated(f"{number} tensors of {', '.join(modules)} replaced")

    async def update_from_tensor(self, request: Request) -> Response:
        body = TensorUpdate.model_validate_json(await request.body())
        if body.load_format != "safetensors":
            raise RequestError(
                f"load_format = {body.load_format!r} is a pickle, which runs whatever code the sender wrote: send base64 "
                'of a safetensors file with load_format = "safetensors", or a manifest to /update_weights_from_manifest'
            )
        modules = body.target_modules or ["transformer"]
        if len(modules) != 1:
            raise RequestError(f"target_modules = {modules}: one module a request")
        tensors: dict[str, Any] = {}
        for payload in body.serialized_named_tensors:
            try:
                tensors |= safetensors.torch.load(base64.b64decode(payload, validate=True))
            except (binascii.Error, safetensors.SafetensorError) as error:
                raise RequestError(f"serialized_named_tensors is no base64 of a safetensors file: {error}") from error
        number = await self._batcher.control(
            lambda worker: worker.update_from_tensors(tensors, module=modules[0], version=body.weight_version)
        )
        return self._updated(f"{number} tensors of {modules[0]} replaced")

    async def update_from_manifest(self, request: Request) -> Response:
        body = ManifestBody.model_validate_json(await request.body())
        if body.transport == "disk":
            check_files([bucket.handle for bucket in body.buckets], self._files, field="buckets.handle")
        manifest = cast(Manifest, body.model_dump())
        certificate = await self._batcher.control(lambda worker: worker.update_from_manifest(manifest))
        return self._updated(f"weights taken by {body.transport}", certificate=dict(certificate))

    async def check_tensors(self, request: Request) -> Response:
        body = TensorCheck.model_validate_json(await request.body())
        hashes = await self._batcher.control(lambda worker: worker.tensor_hashes(body.target_module))
        expected = body.expected_named_tensors_sha256
        missing = sorted(set(expected) - set(hashes))
        mismatched = sorted(name for name in set(expected) & set(hashes) if expected[name] != hashes[name])
        good = not missing and not mismatched
        message = "all tensors match" if good else f"missing: {missing}; mismatched: {mismatched}"
        return _answer(good, message, 200 if good else 400, missing=missing, mismatched=mismatched)

    async def checksums(self, request: Request) -> Response:
        body = Checksums.model_validate_json(await request.body() or b"{}")
        return JSONResponse(await self._batcher.control(lambda worker: worker.checksums(body.module_names)))

    async def release_memory(self, request: Request) -> Response:
        body = Release.model_validate_json(await request.body() or b"{}")
        await self._batcher.control(lambda worker: worker.sleep(body.keep))
        return _answer(True, "memory released", 200, sleeping=True)

    async def resume_memory(self, request: Request) -> Response:
        await self._batcher.control(lambda worker: worker.wake())
        return _answer(True, "memory resumed", 200, sleeping=False)

    async def liveness(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def health(self, request: Request) -> Response:
        state = self._batcher.state
        if state in ("ready", "asleep"):
            return JSONResponse({"status": "ok", "state": state})
        return JSONResponse({"status": state, "detail": self._batcher.failure or "loading the model"}, 503)

    async def server_info(self, request: Request) -> Response:
        batcher, worker = self._batcher, self._batcher.worker
        info = {**self._info, "state": batcher.state, "waiting": batcher.num_waiting, "batches": batcher.num_batches}
        info["progress"] = batcher.progress
        if self._pool is not None:
            pool = self._pool
            info["shared_memory"] = {"bytes": pool.num_bytes, "held": pool.num_held, "refused": pool.num_refused}
        if worker is not None:
            cache = worker.prompt_cache
            info |= {
                "weight_version": worker.weight_version,
                "invalid_weights": worker.receiver.invalid,
                "samples": worker.num_samples,
                "prompt_cache": {"hits": cache.num_hits, "misses": cache.num_misses, "bytes": cache.num_bytes},
            }
        return JSONResponse(info)

    async def model_info(self, request: Request) -> Response:
        components = self._batcher.components
        return JSONResponse(
            {
                "model_path": str(components.folder),
                "model_type": "diffusion",
                "task_type": "T2I",
                "family": components.family.name,
                "architectures": [type(components.transformer).__name__],
                "dtype": str(components.dtype).removeprefix("torch."),
            }
        )

    def _updated(self, message: str, **more: Any) -> Response:
        worker = self._batcher.worker
        assert worker is not None
        return _answer(True, message, 200, weight_version=worker.weight_version, **more)


def create_app(
    batcher: Batcher,
    *,
    info: dict[str, Any],
    pool: BlockPool | None,
    token: str | None,
    files: Sequence[Path] | None,
    lifespan: StatelessLifespan[Starlette],
) -> Starlette:
    """The engine's application. token: that clients must know; None on loopback alone. files: see EngineServer."""
    e = Endpoints(batcher, info, pool, files)
    posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/rollout/generate": e.generate,
        "/rollout/check_prompts": e.check_prompts,
        "/rollout/check_requests": e.check_requests,
        "/update_weights_from_disk": e.update_from_disk,
        "/update_weights_from_tensor": e.update_from_tensor,
        "/update_weights_from_tensor_checker": e.check_tensors,
        "/update_weights_from_manifest": e.update_from_manifest,
        "/get_weights_checksum": e.checksums,
        "/release_memory_occupation": e.release_memory,
        "/resume_memory_occupation": e.resume_memory,
    }
    gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/health": e.health,
        "/health_generate": e.health,
        "/liveness": e.liveness,
        "/server_info": e.server_info,
        "/model_info": e.model_info,
    }
    routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in gets.items()]
    handlers: dict[Any, Any] = {ValidationError: _invalid, VerstError: _failed, Exception: _crashed}
    guard = Middleware(Guard, token=token, limits=LIMITS)
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=[guard])


_REFUSALS = (RequestError, PromptError, SyncError, ModelError, ConfigError)
"""Of a request; any other error is the engine's."""


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, ValidationError)
    status, message = explain(error)
    return _error(message, status)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, Unavailable):
        return _error(str(error), 503, {"Retry-After": "1"})
    if isinstance(error, OtherWeights):
        return _error(str(error), 409)
    if isinstance(error, Expired):
        return _error(str(error), 504)
    return _error(str(error), 400 if isinstance(error, _REFUSALS) else 500)


async def _crashed(request: Request, error: Exception) -> Response:
    return _error(f"{type(error).__name__}: {error}", 500)


def _answer(success: bool, message: str, status: int, **more: Any) -> Response:
    return JSONResponse({"success": success, "message": message, **more}, status)


def _error(message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """`detail` is what generation errors have, `success` and `message` what weight errors have."""
    return JSONResponse({"detail": message, "success": False, "message": message}, status, headers)
