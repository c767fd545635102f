"""The engines of a run as one: least-loaded dispatch, echo checks, weight hand-off to all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal

from verst.engine.client import EngineClient, check_certificate, check_echo
from verst.engine.wire import Answer, GenerateRequest
from verst.errors import EchoError, EngineError, InvariantError
from verst.obs.spans import ENGINE, Spans, lane_of
from verst.rollout.pipeline import first_failure
from verst.rollout.plan import MicrogroupTask
from verst.types import Microgroup


class EnginePool:
    """A request goes to the engine with the fewest requests of ours in flight, at most `per_engine` of them."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        per_engine: int,
        lost: Sequence[str] = (),
        spans: Spans | None = None,
    ) -> None:
        """lost: filled from outside with why ranks of an engine have ended."""
        self._spans = spans or Spans()
        self._lost = lost
        self._clients = list(clients)
        self._in_flight = [0] * len(clients)
        self._slots = asyncio.Semaphore(per_engine * len(clients))
        self._num_answers = {"shared": 0, "sent": 0}
        self._version: int | None = None
        """That all engines hold; None before the first hand-off of ours."""

    async def generate(self, task: MicrogroupTask) -> Answer:
        asked_s = time.monotonic()
        async with self._slots:
            index = min(range(len(self._clients)), key=self._in_flight.__getitem__)
            self._in_flight[index] += 1
            try:
                answer = await self._clients[index].generate(task.request, weight_version=self._version)
                self._num_answers["sent" if answer.shared is None else "shared"] += 1
                self._take_down(answer, asked_s, lane_of(ENGINE, index))
                return answer
            except EngineError as error:
                if self._lost:
                    raise EngineError(f"{error}; {self._lost[0]}") from error
                raise
            finally:
                self._in_flight[index] -= 1

    def _take_down(self, answer: Answer, asked_s: float, lane: str) -> None:
        """The spans of one answer, as far as it is known how it came."""
        times, add = answer.times, self._spans.add
        if times is None:
            return
        batch = {} if times.server is None or times.server.batch is None else {"batch": times.server.batch}
        add("engine_wait", start_s=asked_s, end_s=times.sent_s)
        add("request", start_s=times.sent_s, end_s=times.answered_s, lane=lane, **batch)
        for stage, (start_s, end_s) in times.stages().items():
            add(stage, start_s=start_s, end_s=end_s, lane=lane, **batch)
        add("transfer", start_s=times.answered_s, end_s=times.received_s)

    @staticmethod
    def check(task: MicrogroupTask, microgroup: Microgroup, weight_version: int) -> None:
        """Raises EchoError where the engine used other parameters or weights than it should have."""
        check_echo(task.request, microgroup.echo, weight_version=weight_version)
        made = {sample.weight_version for sample in microgroup.samples}
        if made != {weight_version}:
            raise EchoError(f"samples of weight version {sorted(made)} came back, expected {weight_version}")

    async def sync(self, *manifests: Mapping[str, Any], digest: Awaitable[str] | None = None) -> None:
        """Hand the weights to every engine; each certificate is compared. Raises SyncError.

        manifests: one for all of them, or one for each. digest: of what the trainer sends meanwhile, where the manifest
        does not know it before.
        """
        manifest = manifests[0]
        own = manifests if len(manifests) > 1 else manifests * len(self._clients)
        if busy := sum(self._in_flight):
            raise InvariantError(
                f"weights of version {manifest['version']} while {busy} requests are at the engines: a rollout would be of two"
            )
        try:
            async with asyncio.TaskGroup() as group:
                if digest is not None:
                    sent = group.create_task(_result(digest))
                taken = [
                    group.create_task(client.update_weights(one))
                    for client, one in zip(self._clients, own, strict=True)
                ]
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from failures
        if digest is not None:
            for client, task in zip(self._clients, taken, strict=True):
                check_certificate({**manifest, "digest": sent.result()}, task.result(), engine=client.url)
        self._version = manifest["version"]

    def metrics(self) -> dict[str, float]:
        """Since the last call of this."""
        counts, self._num_answers = self._num_answers, dict.fromkeys(self._num_answers, 0)
        return {f"perf/answers_{way}": float(count) for way, count in counts.items()}

    async def negotiate(self) -> list[str]:
        """How the answers of each engine travel, and why. Raises ConfigError where they cannot as the recipe says."""
        return [await client.negotiate() for client in self._clients]

    async def sleep(self, *, keep: Literal["all", "others"]) -> None:
        """Every engine gives its memory back; see EngineClient.release_memory."""
        await asyncio.gather(*(client.release_memory(keep=keep) for client in self._clients))

    async def wake(self) -> None:
        await asyncio.gather(*(client.resume_memory() for client in self._clients))

    async def check_prompts(self, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        """One line for each prompt that the model's encoders cannot take whole."""
        return await self._clients[0].check_prompts(prompts, max_sequence_length=max_sequence_length)

    async def check_requests(self, requests: Sequence[GenerateRequest]) -> list[str | None]:
        """For each request why the model cannot carry it out; None where it can. Pictures are counted, not read."""
        return await self._clients[0].check_requests(requests)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


async def _result(value: Awaitable[str]) -> str:
    return await value
