"""A bounded queue before the one worker thread: joins requests into batches, keeps weight updates between them.

    HTTP handlers ──generate──> queue ──batch──> worker thread (torch)
    (asyncio)     ──control──>    "    ──call───>      "

The queue lives on the event loop and is served in order of arrival: a request sent before an update is made with the
weights before it. Only generation overtakes generation, and only into a batch that starts anyway.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from verst.engine.images import ConditionImages, check_number, load_images
from verst.engine.request import GenerateRequest
from verst.engine.resolve import Resolved, resolve
from verst.engine.wire import encode_response
from verst.engine.worker import Unavailable, Worker
from verst.errors import EngineError
from verst.families import Components
from verst.web.terms import ANY, Terms
from verst.web.timing import Stopwatch

T = TypeVar("T")
State = Literal["loading", "ready", "asleep", "failed"]
Records = list[dict[str, Any]]
"""One a sample."""


class Expired(EngineError):
    """A request was not done within its time (HTTP 504)."""


class OtherWeights(EngineError):
    """The engine holds weights that a request does not want (HTTP 409)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    resolved: Resolved
    put_s: float
    """When it came into the queue."""
    watch: Stopwatch
    terms: Terms
    encode: Callable[[Records], Any]
    done: asyncio.Future[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Control:
    call: Callable[[Worker], Any]
    done: asyncio.Future[Any]


class Batcher:
    """Takes requests on the event loop that `run` runs on. `run` ending, for whatever reason, is the engine's end."""

    def __init__(
        self,
        make_worker: Callable[[], Worker],
        *,
        deterministic: bool,
        max_batch: int,
        queue_size: int,
        request_timeout_s: float,
    ) -> None:
        """`make_worker` is called on the worker thread. `deterministic`: every request is a batch of its own."""
        self._make_worker = make_worker
        self._deterministic = deterministic
        self._max_batch = max_batch
        self._queue_size = queue_size
        self._timeout_s = request_timeout_s
        self._queue: deque[_Job | _Control] = deque()
        self._serving: list[_Job] | list[_Control] = []
        self._arrival = asyncio.Event()
        self._stopping = False
        self._front: Components | None = None
        self._failure: str | None = None
        self._closing: Future[None] | None = None
        self.worker: Worker | None = None
        """Belongs to the worker thread; only plain attributes may be read from elsewhere."""
        self.num_batches = 0
        self.progress = 0
        """Grows with every denoising step, batch and control call."""

    @property
    def state(self) -> State:
        if self._failure is not None:
            return "failed"
        if self.worker is None:
            return "loading"
        return "asleep" if self.worker.asleep else "ready"

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        return self._failure

    @property
    def components(self) -> Components:
        """The model for the event loop's own use: with tokenizers that the worker thread does not touch.

        A fast tokenizer raises "Already borrowed" when two threads use it. Raises Unavailable, EngineError.
        """
        if self._failure is not None:
            raise EngineError(f"the engine is dead: {self._failure}")
        if self._front is None:
            raise Unavailable("the engine is still loading its model")
        return self._front

    def resolve(self, request: GenerateRequest, *, images: ConditionImages | None = None) -> Resolved:
        """What the engine will do. Raises RequestError or PromptError for what its model or its worker cannot."""
        job = resolve(request, self.components, images=images)
        assert self.worker is not None, "there are components, so there is a worker"
        self.worker.refuse(job)
        return job

    @property
    def num_waiting(self) -> int:
        return sum(isinstance(item, _Job) for item in self._queue)

    async def run(self) -> None:
        """Load the model, then serve the queue until cancelled. Raises what ended it."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="verst-engine")
        failure = "the engine was stopped"
        try:
            self.worker = await asyncio.get_running_loop().run_in_executor(pool, self._make_worker)
            self._front = _front_components(self.worker.components)
            while True:
                await self._arrival.wait()
                if not self._queue:
                    self._arrival.clear()
                    continue
                await self._serve(pool, self.worker)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._stopping = True
            self._failure = failure
            for item in [*self._serving, *self._queue]:
                _settle(item.done, EngineError(f"the engine is dead: {failure}"))
            self._queue.clear()
            if self.worker is not None:
                # Behind the call that may be under way.
                self._closing = pool.submit(self.worker.close)
            pool.shutdown(wait=False)

    def wait_closed(self, timeout_s: float) -> None:
        """After `run`: until the worker thread has left what it shares with others. Raises what it raised."""
        if self._closing is not None:
            self._closing.result(timeout_s)

    async def generate(
        self,
        request: GenerateRequest,
        *,
        terms: Terms = ANY,
        encode: Callable[[Records], Any] = encode_response,
        watch: Stopwatch | None = None,
    ) -> Any:
        """What `encode` makes of the samples, on the worker thread. Cancelling takes a waiting request out of the queue.

        watch: takes down when what was done for it.

        Raises RequestError or PromptError (400), OtherWeights (409), Unavailable (503), Expired (504), EngineError (500).
        """
        components = self.components
        if self.state == "asleep":
            raise Unavailable("the engine has released its memory; resume it first")
        if self.num_waiting >= self._queue_size:
            raise Unavailable(f"{self._queue_size} requests are waiting already (engine.queue_size)")
        paths = request.merged().image_path or ()
        check_number(components.family, len(paths))
        images = await asyncio.to_thread(load_images, paths) if paths else None
        job = _Job(
            resolved=self.resolve(request, images=images),
            put_s=time.perf_counter(),
            watch=watch or Stopwatch(),
            terms=terms,
            encode=encode,
            done=_new_future(),
        )
        self._put(job)
        timeout_s = min(self._timeout_s, terms.timeout_s or self._timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await job.done
        except TimeoutError:
            raise Expired(
                f"the request was not done in {timeout_s:g} s, of which it may all have been waiting: "
                "raise engine.request_timeout_s, or send fewer requests at a time"
            ) from None
        finally:
            job.done.cancel()
            if job in self._queue:
                self._queue.remove(job)
        return answer

    async def control(self, call: Callable[[Worker], T]) -> T:
        """`call(worker)` on the worker thread, between batches, in order of arrival. Raises what it raises."""
        _ = self.components
        item = _Control(call=call, done=_new_future())
        self._put(item)
        # Shielded: a weight update that has begun is finished even when its client goes away.
        return await asyncio.shield(item.done)

    def _put(self, item: _Job | _Control) -> None:
        self._queue.append(item)
        self._arrival.set()

    async def _serve(self, pool: ThreadPoolExecutor, worker: Worker) -> None:
        item = self._queue.popleft()
        if isinstance(item, _Control):
            await self._serve_control(pool, worker, item)
            return
        if not item.terms.admits(worker.weight_version):
            held = f"the engine holds weights of version {worker.weight_version}"
            _settle(item.done, OtherWeights(f"{held}, the request wants {item.terms}"))
            return
        self._serving = batch = [item, *self._companions(item, worker.weight_version)]
        started_s = time.perf_counter()
        for job in batch:
            job.watch.batch = self.num_batches
            job.watch.add("queue", job.put_s, started_s)

        def stopped() -> bool:
            self.progress += 1
            return self._stopping or all(job.done.done() for job in batch)

        def work() -> list[Any]:
            outcomes = worker.generate(
                [job.resolved for job in batch],
                stopped=stopped,
                on_stage=lambda number, stage, start_s, end_s: batch[number].watch.add(stage, start_s, end_s),
            )
            return [_encoded(job, outcome) for job, outcome in zip(batch, outcomes, strict=True)]

        outcomes: list[Any] | BaseException = await self._on_thread(pool, work)
        self.num_batches += 1
        if isinstance(outcomes, BaseException):
            try:
                # First: who hears of a failure asks whether the engine lives, and must not be told so of one that ends.
                await self._check_device(pool, worker, outcomes)
            finally:
                for job in batch:
                    _settle(job.done, outcomes)
            return
        for job, outcome in zip(batch, outcomes, strict=True):
            _settle(job.done, outcome)

    async def _serve_control(self, pool: ThreadPoolExecutor, worker: Worker, item: _Control) -> None:
        self._serving = [item]
        result = await self._on_thread(pool, lambda: item.call(worker))
        _settle(item.done, result)

    def _companions(self, head: _Job, version: int) -> list[_Job]:
        """Waiting requests that fit into the batch of `head`, up to the next weight update; they leave the queue."""
        if self._deterministic:
            return []
        rows, key, chosen = len(head.resolved.seeds), head.resolved.join_key, []
        for item in self._queue:
            if isinstance(item, _Control):
                break
            more = len(item.resolved.seeds)
            wanted = item.resolved.join_key == key and item.terms.admits(version)
            if wanted and rows + more <= self._max_batch:
                chosen.append(item)
                rows += more
        for job in chosen:
            self._queue.remove(job)
        return chosen

    async def _on_thread(self, pool: ThreadPoolExecutor, call: Callable[[], Any]) -> Any:
        """The call's result, or the exception it raised as a value."""
        future = asyncio.get_running_loop().run_in_executor(pool, call)
        await asyncio.wait({future})
        self.progress += 1
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise EngineError(f"the worker thread ended with {error!r}")
        return future.result() if error is None else error

    async def _check_device(self, pool: ThreadPoolExecutor, worker: Worker, cause: BaseException) -> None:
        """After a failed batch: a device that computes no more (a CUDA fault is for good), or ranks that lost each other,
        end the engine."""
        problem = await self._on_thread(pool, worker.probe)
        if isinstance(problem, Exception):
            raise EngineError(f"the engine computes no more ({problem}) since a batch failed: {cause}")


def _encoded(job: _Job, outcome: Records | EngineError) -> Any:
    """On the worker thread, where the tensors were made: nothing else uses the device meanwhile."""
    if isinstance(outcome, EngineError):
        return outcome
    if job.done.done():
        # Nobody waits for the answer any more: a shared block would only be held up.
        return None
    started_s = time.perf_counter()
    encoded = job.encode(outcome)
    job.watch.add("ship", started_s, time.perf_counter())
    return encoded


def _new_future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _settle(done: asyncio.Future[Any], outcome: Any) -> None:
    if done.done():
        return
    if isinstance(outcome, BaseException):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)


def _front_components(components: Components) -> Components:
    modules = {
        name: copy.deepcopy(part) if isinstance(part, PreTrainedTokenizerBase) else part
        for name, part in components.modules.items()
    }
    return dataclasses.replace(components, modules=modules)
