"""The engines of a run as one: least-loaded dispatch, echo checks, weight hand-off to all of them.

ready ─request fails, engine is lost─> lost ─replaced, with the weights of now─> ready
                                         └─replaced, but those weights are nobody's any more─> stale ─sync─> ready
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from verst.engine.client import EngineClient, check_certificate, check_echo
from verst.engine.wire import Answer, GenerateRequest
from verst.errors import EchoError, EngineError, InvariantError, StateLost, SyncError
from verst.obs.spans import ENGINE, Spans, lane_of
from verst.rollout.pipeline import raise_first
from verst.rollout.plan import MicrogroupTask
from verst.rollout.routed import Route
from verst.types import Microgroup

T = TypeVar("T")


class Mender(Protocol):
    """Whoever owns the engines' processes."""

    async def is_lost(self, client: EngineClient, error: EngineError | SyncError) -> bool:
        """Whether that failure is the end of the engine, and not of the request alone."""

    async def replace(self, index: int, error: EngineError | SyncError) -> tuple[EngineClient, bool]:
        """The client of an engine in its place, and whether that holds the weights of now. Raises what ends the run."""


@dataclass
class _Seat:
    """One engine's place in the pool."""

    client: EngineClient
    state: Literal["ready", "lost", "stale"] = "ready"
    in_flight: int = 0
    takes_weights: bool = False
    mending: asyncio.Task[None] | None = None


class EnginePool:
    """A request goes to the engine with the fewest requests of ours in flight, at most `per_engine` of them.

    A request whose engine is lost is made again, the same with the same seeds: by another engine, or by the one that comes
    in its place. Where there is a router, it does both, and knows of no engine but those that are ready.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        per_engine: int,
        mender: Mender | None = None,
        route: Route | None = None,
        spans: Spans | None = None,
    ) -> None:
        """mender: None = the failure of an engine is that of the request. route: that requests for samples take; None =
        straight to an engine."""
        self._spans = spans or Spans()
        self._mender = mender
        self._seats = [_Seat(client) for client in clients]
        self._slots = asyncio.Semaphore(per_engine * len(clients))
        self._num_answers = {"shared": 0, "sent": 0}
        self._num_reissued = 0
        self._version: int | None = None
        """That all engines hold; None before the first hand-off of ours."""
        self.num_lost = 0
        """Engines that were lost so far."""
        self._route = route
        self._numbers: dict[str, int] = {}
        """URL that the router was told of, of lost engines too -> number of the engine."""
        self._routed: set[asyncio.Task[Answer]] = set()

    async def generate(self, task: MicrogroupTask) -> Answer:
        """Raises what the engine raises; of an engine that was lost, what its mender raises, or StateLost."""
        asked_s = time.monotonic()
        if self._route is None:
            answer, index = await self._ask(lambda client: client.generate(task.request, weight_version=self._version))
        else:
            answer, index = await self._through(self._route, task)
        self._take_down(answer, asked_s, lane_of(ENGINE, index))
        self._num_answers["sent" if answer.shared is None else "shared"] += 1
        return answer

    async def _ask(self, work: Callable[[EngineClient], Awaitable[T]], *, with_weights: bool = True) -> tuple[T, int]:
        """The result, and the number of the engine that it is of. with_weights: work that needs those of now."""
        async with self._slots:
            while True:
                seat = await self._ready(("ready",) if with_weights else ("ready", "stale"))
                client = seat.client
                seat.in_flight += 1
                try:
                    return await work(client), self._seats.index(seat)
                except EngineError as error:
                    failure = error
                finally:
                    seat.in_flight -= 1
                if seat.state != "lost" and seat.client is client and not await self._judge(seat, client, failure):
                    raise failure
                self._num_reissued += 1

    async def _through(self, route: Route, task: MicrogroupTask) -> tuple[Answer, int]:
        """The answer, and the number of the engine that made it."""
        async with self._slots:
            while True:
                await self._ready(("ready",))
                call = asyncio.create_task(route.generate(task.request, weight_version=self._version))
                self._routed.add(call)
                try:
                    await asyncio.wait({call})
                    # Otherwise no engine would ever take it: why, comes out above.
                    if not call.cancelled():
                        answer = call.result()
                        assert answer.made_at is not None, "a router says which engine has answered"
                        self._num_reissued += answer.reissued
                        return answer, self._numbers[answer.made_at]
                except EngineError as error:
                    if not await self._is_one_lost(error):
                        raise
                finally:
                    self._routed.discard(call)
                    if call.cancel():
                        await asyncio.wait({call})
                self._num_reissued += 1

    async def _is_one_lost(self, error: EngineError) -> bool:
        """Whether an engine is on its way in the place of one that was lost by the failure of a routed request."""
        named = [seat for seat in self._seats if seat.client.url == error.engine]
        judged = await asyncio.gather(*(self._judge(seat, seat.client, error) for seat in named or self._seats))
        return any(judged) or bool(self._coming())

    async def put_aside(self, url: str, reason: str) -> None:
        """The router cannot ask this engine any more: it is replaced where it is lost, and not in the middle of an update."""
        for seat in self._seats:
            if seat.client.url == url and seat.state == "ready":
                error = EngineError(f"engine {url} was put aside by the router: {reason}")
                if self._mender is None:
                    await self._end_with(seat, error)
                    continue
                await self._judge(seat, seat.client, error, unless=functools.partial(_takes_weights, seat))

    async def _end_with(self, seat: _Seat, error: EngineError) -> None:
        """Nobody brings it back: where it is lost, that is the failure of all requests."""
        if not await seat.client.health():
            seat.state = "lost"
            seat.mending = asyncio.create_task(_failed(error), name="verst-engine-lost")
            seat.mending.add_done_callback(self._mended)

    async def _ready(self, states: tuple[str, ...]) -> _Seat:
        while True:
            self._raise_failures()
            ready = [seat for seat in self._seats if seat.state in states]
            if ready:
                return min(ready, key=lambda seat: seat.in_flight)
            coming = self._coming()
            if not coming:
                raise StateLost("all engines came back after the trainer had begun to change their weights")
            await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)

    async def _judge(
        self,
        seat: _Seat,
        client: EngineClient,
        error: EngineError | SyncError,
        *,
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Whether its engine is lost; then another one is on its way. unless: asked last, that nothing shall be done."""
        if self._mender is None:
            return False
        lost = await self._mender.is_lost(client, error)
        if seat.state == "lost" or seat.client is not client:
            return True
        if lost and not unless():
            seat.state = "lost"
            self.num_lost += 1
            seat.mending = asyncio.create_task(self._mend(seat, self._mender, error), name="verst-engine-replaced")
            seat.mending.add_done_callback(self._mended)
        return lost

    async def _mend(self, seat: _Seat, mender: Mender, error: EngineError | SyncError) -> None:
        lost, number = seat.client, self._seats.index(seat)
        await self._tell()
        seat.client, holds_weights = await mender.replace(number, error)
        seat.state = "ready" if holds_weights else "stale"
        await lost.close()
        await self._tell()

    def _mended(self, mending: asyncio.Task[None]) -> None:
        """Requests in the router wait for an engine of their weights: where none will come, they are told so."""
        failed = mending.cancelled() or mending.exception() is not None
        if failed or not (self._coming() or any(seat.state == "ready" for seat in self._seats)):
            for call in self._routed:
                call.cancel()

    async def _tell(self) -> None:
        """The router which engines there are, and what they hold."""
        if self._route is not None:
            ready = {seat.client.url: i for i, seat in enumerate(self._seats) if seat.state == "ready"}
            self._numbers |= ready
            await self._route.tell(list(ready), weight_version=self._version)

    def _coming(self) -> list[asyncio.Task[None]]:
        return [seat.mending for seat in self._seats if seat.mending is not None and not seat.mending.done()]

    def _raise_failures(self) -> None:
        for seat in self._seats:
            if seat.mending is not None and seat.mending.done():
                seat.mending.result()

    async def mend(self, error: EngineError | SyncError) -> bool:
        """After a failure of all of them together: whether engines were lost, which are replaced by now."""
        judged = await asyncio.gather(*(self._judge(seat, seat.client, error) for seat in self._seats))
        await self.settled()
        return any(judged)

    async def settled(self) -> None:
        """Returns when no engine is being replaced. Raises what ends the run."""
        if coming := self._coming():
            await asyncio.wait(coming)
        self._raise_failures()

    async def abandoned(self) -> list[int]:
        """After the state of the run was lost: the engines that could not be replaced, for `put`; nothing is raised."""
        await asyncio.gather(*self._coming(), return_exceptions=True)
        return [index for index, seat in enumerate(self._seats) if seat.state == "lost"]

    async def put(self, index: int, client: EngineClient) -> None:
        """A new engine in this place; it gets its weights by the next sync."""
        seat = self._seats[index]
        await seat.client.close()
        self._seats[index] = _Seat(client, state="stale")
        await self._tell()

    def has_work(self, index: int) -> bool:
        """Something of ours waits for this engine."""
        seat = self._seats[index]
        return (
            seat.in_flight > 0 or seat.takes_weights or (self._route is not None and self._route.works(seat.client.url))
        )

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

    async def sync(self, *manifests: Mapping[str, Any], digest: Awaitable[str] | None = None) -> str:
        """Hand the weights to every engine; each certificate is compared. Raises SyncError. The digest of them.

        manifests: one for all of them, or one for each. digest: of what the trainer sends meanwhile, where the manifest
        does not know it before.
        """
        routed = 0 if self._route is None else self._route.in_flight
        if busy := routed + sum(seat.in_flight for seat in self._seats):
            version = manifests[0]["version"]
            raise InvariantError(
                f"weights of version {version} while {busy} requests are at the engines: a rollout would be of two"
            )
        own = manifests if len(manifests) > 1 else manifests * len(self._seats)
        for seat in self._seats:
            seat.takes_weights = True
        try:
            taken = await hand_over([seat.client for seat in self._seats], own, digest=digest)
        finally:
            for seat in self._seats:
                seat.takes_weights = False
        for seat in self._seats:
            seat.state = "ready"
        self._version = manifests[0]["version"]
        await self._tell()
        return taken

    def metrics(self) -> dict[str, float]:
        """Since the last call of this."""
        counts, self._num_answers = self._num_answers, dict.fromkeys(self._num_answers, 0)
        metrics = {f"perf/answers_{way}": float(count) for way, count in counts.items()}
        if self._route is not None:
            self._num_reissued += self._route.num_reissued
            self._route.num_reissued = 0
        if self._num_reissued:
            metrics["supervision/reissued"] = float(self._num_reissued)
            self._num_reissued = 0
        return metrics

    async def negotiate(self) -> list[str]:
        """How the answers of each engine travel, and why. Raises ConfigError where they cannot as the recipe says."""
        if self._route is not None:
            await self._tell()
            return [f"{self._route.transport}, through the router"]
        while True:
            try:
                return [await seat.client.negotiate() for seat in self._seats]
            except EngineError as error:
                # In the start of a run; later each engine that comes back is asked as it comes.
                if not await self.mend(error):
                    raise

    async def sleep(self, *, keep: Literal["all", "others"]) -> None:
        """Every engine gives its memory back; see EngineClient.release_memory."""
        await asyncio.gather(*(seat.client.release_memory(keep=keep) for seat in self._seats))

    async def wake(self) -> None:
        await asyncio.gather(*(seat.client.resume_memory() for seat in self._seats))

    async def check_prompts(self, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        """One line for each prompt that the model's encoders cannot take whole."""
        problems, _ = await self._ask(
            lambda client: client.check_prompts(prompts, max_sequence_length=max_sequence_length),
            with_weights=False,
        )
        return problems

    async def check_requests(self, requests: Sequence[GenerateRequest]) -> list[str | None]:
        """For each request why the model cannot carry it out; None where it can. Pictures are counted, not read."""
        problems, _ = await self._ask(lambda client: client.check_requests(requests), with_weights=False)
        return problems

    async def close(self) -> None:
        for coming in self._coming():
            coming.cancel()
            await asyncio.wait({coming})
        if self._route is not None:
            await self._route.close()
        for seat in self._seats:
            await seat.client.close()


async def hand_over(
    clients: Sequence[EngineClient], manifests: Sequence[Mapping[str, Any]], *, digest: Awaitable[str] | None = None
) -> str:
    """Each its manifest; the digest of the weights that all of them certify. Raises SyncError, EngineError.

    digest: see `EnginePool.sync`.
    """
    sent = None
    try:
        async with asyncio.TaskGroup() as group:
            if digest is not None:
                sent = group.create_task(_result(digest))
            taken = [
                group.create_task(client.update_weights(one)) for client, one in zip(clients, manifests, strict=True)
            ]
    except BaseExceptionGroup as failures:
        raise_first(failures)
    if sent is None:
        known: str = manifests[0]["digest"]
        return known
    for client, manifest, task in zip(clients, manifests, taken, strict=True):
        check_certificate({**manifest, "digest": sent.result()}, task.result(), engine=client.url)
    return sent.result()


def _takes_weights(seat: _Seat) -> bool:
    return seat.takes_weights


async def _failed(error: EngineError) -> None:
    raise error


async def _result(value: Awaitable[str]) -> str:
    return await value
