"""The client of an engine: asks, retries only what cannot have done harm, and checks what was really done."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, cast

import httpx

from verst.engine.blocks import BlockPool, allows_more_files, supported
from verst.engine.request import GenerateRequest
from verst.engine.transport import Accepted, receive
from verst.engine.wire import Answer
from verst.errors import ConfigError, EchoError, EngineError, RequestError, SyncError
from verst.web.guard import bearer
from verst.web.terms import ENGINE, REISSUED, Terms
from verst.web.timing import HEADER, AnswerTimes, Clocks, ServerTimes
from verst.weights.block import host_identity
from verst.weights.manifest import Certificate, Manifest, verify

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
Transport = Literal["auto", "msgpack", "shm"]
Compression = Literal["none", "zstd", "lz4"]


class EngineClient:
    """One engine (or a router before several). Use it on one event loop, and `close` it or use `async with`."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 900.0,
        busy_s: float = 600.0,
        refused_s: float = 10.0,
        transport: Transport = "msgpack",
        compression: Compression = "none",
        hosts: Collection[str] = (),
        pool: BlockPool | None = None,
        token: str | None = None,
    ) -> None:
        """timeout_s: one answer may take; busy_s: a 503 is tried again; refused_s: a refused connection is.

        hosts: identities of the hosts, besides this one, on which answers will be read; pool: where those that come
        over the network are put; token: that the engine wants to see.
        """
        self._transport = transport
        self._accepted = Accepted(codec=None if compression == "none" else compression)
        self._hosts = {host_identity(), *hosts}
        self._pool = pool
        self._clocks = Clocks()
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._busy_s = busy_s
        self._refused_s = refused_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=bearer(token),
            timeout=httpx.Timeout(timeout_s, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=5.0),
            # Engines are reached directly, whatever proxy the environment names.
            trust_env=False,
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def negotiate(self) -> str:
        """Agree on how answers travel, before the first of them; how, and why so.

        Raises ConfigError where transport "shm" is impossible, EngineError where the engine cannot be asked.
        """
        if self._transport == "msgpack":
            return "msgpack (rollout.transport)"
        problem = await self._no_shared_memory()
        if problem is None:
            self._accepted = replace(self._accepted, shared=True)
            return "shm: engine and readers share a host"
        if self._transport == "shm":
            raise ConfigError(f'rollout.transport = "shm": engine {self.url} {problem}; use "msgpack" or "auto"')
        return f"msgpack: engine {self.url} {problem}"

    async def _no_shared_memory(self) -> str | None:
        """Why the engine's answers cannot come in shared memory; None where they can."""
        if not supported():
            return "and this process have no memfd on this system"
        try:
            info: dict[str, Any] = (await self._http.get("/server_info", timeout=10.0)).json()
        except (httpx.TransportError, ValueError) as error:
            raise EngineError(f"engine {self.url} does not say what it is: {error}") from error
        if "shared_memory" not in info:
            return str(info.get("no_shared_memory", "offers no shared memory"))
        others = sorted(self._hosts - {info["host"]})
        return f"is on host {info['host']}, answers are read on {', '.join(others)}" if others else None

    async def generate(self, request: GenerateRequest, *, weight_version: int | None = None) -> Answer:
        """The response as it came. weight_version: that shall make it.

        Raises RequestError (refused), EchoError (other weights are held), EngineError (failed, died, busy for too long).
        """
        body, path = request.model_dump(mode="json", exclude_none=True), "/rollout/generate"
        terms = Terms(version=weight_version, timeout_s=self._timeout_s)
        # Every answer in shared memory that is held is an open file.
        accepted = self._accepted if allows_more_files() else replace(self._accepted, shared=False)
        response, sent_s = await self._open(path, body, headers={**accepted.headers(), **terms.headers()})
        answered_s = time.monotonic()
        try:
            answer = await receive(response, self._pool)
        except httpx.TransportError as error:
            raise self._dropped(path, error) from error
        finally:
            await response.aclose()
        server = ServerTimes.of(response.headers.get(HEADER))
        times = AnswerTimes(
            sent_s=sent_s,
            answered_s=answered_s,
            received_s=time.monotonic(),
            server=server,
            arrived_s=self._clocks.arrived(server, sent_s=sent_s, answered_s=answered_s) if server else 0.0,
        )
        made_at, reissued = response.headers.get(ENGINE), response.headers.get(REISSUED, "0")
        return replace(answer, times=times, made_at=made_at, reissued=int(reissued) if reissued.isdecimal() else 0)

    async def update_weights(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Make the engine take the announced weights; its certificate, compared with the manifest.

        Raises SyncError when it did not take exactly these, EngineError when it failed.
        """
        try:
            answer = (await self._post("/update_weights_from_manifest", dict(manifest))).json()
        except RequestError as error:
            raise SyncError(f"engine {self.url} took no weights: {error}") from error
        certificate: dict[str, Any] = answer["certificate"]
        check_certificate(manifest, certificate, engine=self.url)
        return certificate

    async def check_prompts(self, prompts: Sequence[str], *, max_sequence_length: int | None = None) -> list[str]:
        """One line for each prompt that is longer than an encoder takes. Raises EngineError."""
        body = {"prompts": list(prompts), "max_sequence_length": max_sequence_length}
        problems: list[str] = (await self._post("/rollout/check_prompts", body)).json()
        return problems

    async def check_requests(self, requests: Sequence[GenerateRequest]) -> list[str | None]:
        """For each request why it would be refused; None where it would not. Raises EngineError."""
        body = {"requests": [request.model_dump(mode="json", exclude_none=True) for request in requests]}
        problems: list[str | None] = (await self._post("/rollout/check_requests", body)).json()
        return problems

    async def checksum(self, modules: Sequence[str] | None = None) -> dict[str, str]:
        """module -> SHA-256 over its tensors. Raises EngineError."""
        body = {"module_names": None if modules is None else list(modules)}
        sums: dict[str, str] = (await self._post("/get_weights_checksum", body)).json()
        return sums

    async def release_memory(self, *, keep: Literal["all", "others"] = "all") -> None:
        """others: the transformer's weights are given up, and the next update brings all of them."""
        await self._post("/release_memory_occupation", {} if keep == "all" else {"keep": keep})

    async def resume_memory(self) -> None:
        await self._post("/resume_memory_occupation", {})

    async def health(self) -> bool:
        """The engine is loaded and its worker lives; False as well when it cannot be reached. One attempt."""
        return await self._answers("/health")

    async def _answers(self, path: str) -> bool:
        try:
            return (await self._http.get(path, timeout=10.0)).status_code == 200
        except httpx.TransportError:
            return False

    async def put_engines(self, urls: Sequence[str], *, weight_version: int | None) -> list[dict[str, Any]]:
        """Of a router: these are its engines, and no others; what it knows of each. weight_version: that all of them hold.

        Raises EngineError.
        """
        body = {"engines": list(urls), "weight_version": weight_version}
        return await self._rows("PUT", timeout_s=self._timeout_s, json=body)

    async def engines(self) -> list[dict[str, Any]]:
        """Of a router: what it knows of each of its engines. Raises EngineError."""
        return await self._rows("GET", timeout_s=10.0)

    async def _rows(self, method: str, *, timeout_s: float, **more: Any) -> list[dict[str, Any]]:
        path = "/engines"
        try:
            response = await self._http.request(method, path, timeout=timeout_s, **more)
        except httpx.TransportError as error:
            raise self._dropped(path, error) from error
        rows: list[dict[str, Any]] = self._checked(response, path).json()
        return rows

    async def live(self) -> bool:
        """The process answers, whatever else it can do. One attempt."""
        return await self._answers("/liveness")

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        response, _ = await self._open(path, body)
        try:
            await response.aread()
        except httpx.TransportError as error:
            raise self._dropped(path, error) from error
        finally:
            await response.aclose()
        return response

    async def _open(
        self, path: str, body: dict[str, Any], *, headers: Mapping[str, str] | None = None
    ) -> tuple[httpx.Response, float]:
        """A response that is not read yet, and when (`time.monotonic()`) the request was sent that it answers.

        Retries only what the engine cannot have begun: 503, a refused connection.
        """
        start, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            sent_s = time.monotonic()
            try:
                response = await self._http.send(
                    self._http.build_request("POST", path, json=body, headers=headers), stream=True
                )
                if not response.is_success:
                    await response.aread()
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                problem, patience = f"cannot be reached: {error}", self._refused_s
            except httpx.TransportError as error:
                raise self._dropped(path, error) from error
            else:
                if response.status_code != 503:
                    return self._checked(response, path), sent_s
                problem, patience = f"is not available: {_message(response)}", self._busy_s
            if time.monotonic() - start + pause > patience:
                raise EngineError(f"engine {self.url} {problem} (tried for {patience} s)")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _dropped(self, path: str, error: httpx.TransportError) -> EngineError:
        return EngineError(f"engine {self.url} dropped {path}: {type(error).__name__} {error}")

    def _checked(self, response: httpx.Response, path: str) -> httpx.Response:
        if response.status_code >= 500:
            url = response.headers.get(ENGINE, self.url)
            failure = EngineError(f"engine {url} failed at {path} ({response.status_code}): {_message(response)}")
            failure.engine = url
            raise failure
        if response.status_code == 409:
            raise EchoError(f"engine {self.url}: {_message(response)}")
        if response.status_code >= 400:
            raise RequestError(_message(response))
        return response


def check_certificate(manifest: Mapping[str, Any], certificate: Mapping[str, Any], *, engine: str) -> None:
    """Raises SyncError unless the engine holds exactly what the manifest says."""
    verify(cast(Manifest, manifest), cast(Certificate, certificate), engine=engine)


def check_echo(
    request: GenerateRequest,
    echo: Mapping[str, Any],
    *,
    weight_version: int | None = None,
    sigmas: Sequence[float] | None = None,
    model_dtype: str | None = None,
) -> None:
    """Raises EchoError naming the first parameter that the engine used differently from what was asked for.

    `sigmas` ([T+1], compared as fp32), `weight_version` and `model_dtype` are compared where given.
    """
    expected = _expected(request)
    if weight_version is not None:
        expected["weight_version"] = weight_version
    if model_dtype is not None:
        expected["model_dtype"] = model_dtype
    for name, value in expected.items():
        _compare(name, value, echo)
    if "truncated_prompts" not in echo:
        raise EchoError("truncated_prompts: the engine does not say how many prompts it cut")
    if sigmas is not None:
        _compare("sigmas", [_fp32(sigma) for sigma in sigmas], echo)


def _expected(request: GenerateRequest) -> dict[str, Any]:
    """What the echo must say: every value that was sent, and what follows from those left out."""
    merged = request.merged()
    expected = merged.model_dump(mode="json", exclude_none=True)
    count, seeds = merged.num_samples, list(merged.sample_seeds())
    expected |= {
        "seeds": seeds,
        "initial_seeds": list(merged.initial_seeds or seeds),
        "prompts": list(merged.prompts or (merged.prompt,) * count),
        "num_outputs_per_prompt": count,
    }
    if merged.generator_device == "cuda":
        del expected["generator_device"]  # by the contract, the engine's own device
    if merged.true_cfg_scale is not None:
        expected["guidance_scale"] = merged.true_cfg_scale
    if merged.long_prompts == "refuse":
        expected["truncated_prompts"] = 0
    if not merged.rollout:
        return {name: value for name, value in expected.items() if not name.startswith("rollout_")}
    steps = merged.num_inference_steps
    if merged.rollout_sde_type == "ode":
        expected["rollout_sde_step_indices"] = []
    elif merged.rollout_sde_step_indices is None and steps is not None:
        expected["rollout_sde_step_indices"] = list(range(steps))
    if merged.rollout_return_step_indices is None and steps is not None:
        expected["rollout_return_step_indices"] = list(range(steps + 1))
    return expected


def _compare(name: str, expected: Any, echo: Mapping[str, Any]) -> None:
    if name not in echo:
        raise EchoError(f"{name}: {expected!r} was asked for, the engine does not say what it used")
    used = echo[name]
    # False == 0 in Python, and is another answer.
    if used != expected or isinstance(used, bool) != isinstance(expected, bool):
        raise EchoError(f"{name}: {expected!r} was asked for, the engine used {used!r}")


def _fp32(value: float) -> float:
    number: float = struct.unpack("f", struct.pack("f", value))[0]
    return number


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text[:500] or f"HTTP {response.status_code}"
