"""Which faults a run survives: budget and diagnosis, hangs by progress, engines and workers that come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_fixtures import on_a_loop, on_virtual_time
from test_pipeline import ANSWER, task_of

from verst.cluster.calls import ActorPool
from verst.cluster.comeback import Comeback
from verst.cluster.diagnosis import last_lines, likely_cause
from verst.cluster.hand_over import HandOver
from verst.cluster.supervisor import Fault, Supervisor, Watched
from verst.cluster.trainers import TrainerGroup
from verst.config import load_recipe
from verst.config.rewards import PythonReward
from verst.config.supervision import SupervisionConfig
from verst.engine.wire import Answer, GenerateRequest
from verst.errors import ConfigError, EngineError, InvariantError, ProcessDied, StateLost, SyncError
from verst.rewards.base import RewardBatch
from verst.rewards.pool import RewardPool
from verst.rollout.engines import EnginePool

DIED = "The actor died unexpectedly before finishing this task."


@pytest.mark.parametrize(
    ("reason", "log", "cause"),
    [
        (DIED, ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"], "out of GPU memory"),
        (DIED, ["ModuleNotFoundError: No module named 'paddle'"], "an import failed: No module named 'paddle'"),
        (DIED, ["Fatal Python error: Segmentation fault"], "crashed in native code"),
        ("OSError: [Errno 28] No space left on device", [], "a disk is full"),
        (DIED, ["Traceback:", "ValueError: 3 is not 4"], "it raised ValueError: 3 is not 4"),
        ("SGLang's server at http://127.0.0.1:1 is gone.", [], "the SGLang server behind it ended; its log is in"),
        (DIED, ["loading the model"], "killed by a signal from outside"),
    ],
)
def test_the_likely_cause_is_read_from_the_last_words(reason: str, log: list[str], cause: str) -> None:
    assert likely_cause(reason, log).startswith(cause)


def test_the_kernel_and_our_own_kill_are_told_apart() -> None:
    assert "ran out of memory" in likely_cause(DIED, ["loading"], kernel_kills=1)
    assert likely_cause(DIED, ["ImportError: x"], unanswered=True).startswith("it hung")


def test_last_lines_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "worker.err"
    path.write_text(":job_id:01\n" + "".join(f"line {i}\n\n" for i in range(50_000)))
    assert last_lines(path) == [f"line {i}" for i in range(49_980, 50_000)]
    assert last_lines(tmp_path / "none.err") == []


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def supervisor_of(**values: Any) -> tuple[Supervisor, Clock, list[tuple[str, dict[str, Any]]]]:
    clock, events = Clock(), []
    config = SupervisionConfig(**values)
    return Supervisor(config, on_event=lambda *event: events.append(event), clock=clock), clock, events  # type: ignore[arg-type]


def test_faults_within_the_window_are_counted_for_each_process() -> None:
    supervisor, clock, events = supervisor_of(restarts=2, window_s=100.0)
    engine = Fault(kind="engine", process="engine 0", reason=DIED, log=("MemoryError",))
    for clock.now in (0.0, 50.0, 120.0):  # the first is outside of the window by then
        supervisor.fault(engine)
    supervisor.fault(Fault(kind="engine", process="engine 1", reason=DIED))
    clock.now = 130.0
    with pytest.raises(ProcessDied) as raised:
        supervisor.fault(engine)
    said = str(raised.value)
    for part in ("engine 0", "3 times in 100 s", "supervision.restarts = 2", DIED, "out of host memory", "MemoryError"):
        assert part in said
    assert supervisor.metrics() == {"supervision/restarts/engine": 4.0}
    assert [event["final"] for _, event in events] == [0, 0, 0, 0, 1]


def test_without_supervision_the_first_fault_is_the_last() -> None:
    supervisor, _, _ = supervisor_of(enabled=False)
    with pytest.raises(ProcessDied, match="the parser 0 process ended The actor died"):
        supervisor.fault(Fault(kind="parser", process="parser 0", reason=DIED))


def test_a_hang_is_work_without_progress() -> None:
    supervisor, _, events = supervisor_of(poll_s=1.0)
    steps, ended, working = [0], [], [True]
    supervisor.watch(
        "engine 0",
        Watched(
            limit_s=10.0,
            key="supervision.engine_s",
            has_work=lambda: working[0],
            progress=lambda: steps[0],
            end=lambda: ended.append(steps[0]),
        ),
    )
    for _ in range(100):  # a long denoising: far more than the limit, a step each 5 s
        supervisor.look(5.0)
        steps[0] += 1
    working[0] = False
    for _ in range(100):
        supervisor.look(5.0)
    assert ended == []
    working[0] = True
    for _ in range(4):
        supervisor.look(5.0)
    assert ended == [100]
    supervisor.fault(Fault(kind="engine", process="engine 0", reason=DIED))
    (_, hang), (_, fault) = events
    assert hang["reason"] == fault["reason"] == "made no progress for 15 s (supervision.engine_s = 10)"
    assert fault["cause"].startswith("it hung")


def test_a_limit_below_the_looks_is_refused() -> None:
    grpo = Path(__file__).parent / "data" / "grpo.toml"
    with pytest.raises(ConfigError, match=r"supervision.parser_s = 3 .* use at least 4"):
        load_recipe(grpo, ["supervision.parser_s=3.0"])


class Actor:
    """Answers until it is dead."""

    def __init__(self, value: int, *, dead: bool = False) -> None:
        self.value, self.dead, self.asked = value, dead, 0

    def submit(self) -> Awaitable[int]:
        self.asked += 1
        return asyncio.ensure_future(self._answer())

    async def _answer(self) -> int:
        await asyncio.sleep(0)
        if self.dead:
            raise ProcessDied("the parser 0 process ended")
        return self.value


@on_a_loop
async def test_calls_of_a_dead_worker_are_made_again_by_the_one_in_its_place() -> None:
    dead, fresh, made = Actor(1, dead=True), Actor(2), []

    async def replace(index: int, error: ProcessDied) -> tuple[Actor, str]:
        made.append(index)
        await asyncio.sleep(0.01)
        return fresh, "host"

    pool = ActorPool([dead], role="parser", replace=replace)
    assert await asyncio.gather(*(pool.call(Actor.submit) for _ in range(5))) == [2] * 5
    assert (made, dead.asked, fresh.asked) == ([0], 5, 5)
    assert not pool.has_work(0)
    assert pool.num_done(0) == 10
    assert await ActorPool([Actor(1), Actor(3)], role="parser").call(Actor.submit) == 1
    with pytest.raises(ProcessDied):
        await ActorPool([dead], role="parser").call(Actor.submit)


@on_virtual_time
async def test_the_time_of_a_call_is_not_that_of_a_worker_coming_back() -> None:
    fresh = Actor(7)

    async def replace(index: int, error: ProcessDied) -> tuple[Actor, str]:
        await asyncio.sleep(90.0)
        return fresh, "host"

    pool = ActorPool([Actor(1, dead=True)], role="reward", replace=replace)

    async def call(batch: RewardBatch) -> list[int]:
        return [await pool.call(Actor.submit, timeout_s=20.0)]

    config = PythonReward(path="a:b", timeout_s=20.0, attempts=1)
    batch = RewardBatch.plain(torch.zeros(1, 1, 2, 2, 3, dtype=torch.uint8), ["a"])
    result = await RewardPool(config, call, deterministic=True, limited=False).score(batch)
    assert (result.values, result.num_attempts) == ((7.0,), 1)

    async def never(actor: Actor) -> int:
        await asyncio.get_running_loop().create_future()
        return actor.value

    with pytest.raises(TimeoutError):
        await pool.call(never, timeout_s=20.0)


class OfNobody:
    """In the place of `Processes`."""

    async def last_lines(self, name: str) -> list[str]:
        return [f"{name} was here"]


def comeback_of(
    supervisor: Supervisor, *births: Exception | str | None
) -> tuple[Comeback[str], Callable[[], Any], list[str]]:
    """How a process comes up whose first, second, ... birth ends like this, None = never; its first one, and what was done."""
    left, done = iter(births), list[str]()

    async def born() -> str:
        outcome = next(left)
        done.append("born")
        if outcome is None:
            await asyncio.Event().wait()
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, str)
        return outcome

    async def ended() -> None:
        done.append("ended")

    comeback = Comeback(
        process="reward r 0",
        kind="reward",
        begin=born,
        end=ended,
        start_s=20.0,
        processes=OfNobody(),  # type: ignore[arg-type]
        supervisor=supervisor,
    )
    return comeback, born, done


@on_virtual_time
async def test_a_process_that_ends_or_hangs_in_its_start_comes_back() -> None:
    supervisor, _, events = supervisor_of(restarts=2)
    comeback, first, done = comeback_of(supervisor, ProcessDied(DIED), None, "ready")
    assert await comeback.up(first) == "ready"
    assert done == ["born", "ended", "born", "ended", "born"]
    assert [name for name, _ in events] == ["fault", "hang", "fault", "restart"]
    assert events[2][1]["reason"] == "it was not there after 20 s (supervision.start_s)"
    assert events[2][1]["cause"].startswith("it hung")
    assert supervisor.metrics() == {"supervision/restarts/reward": 2.0}


@on_virtual_time
async def test_a_start_that_fails_too_often_is_explained_and_one_that_is_refused_is_not_tried_again() -> None:
    supervisor, _, _ = supervisor_of(restarts=1)
    comeback, first, done = comeback_of(supervisor, None, ProcessDied(DIED))
    with pytest.raises(
        ProcessDied, match=r"2 times in 3600 s, more than supervision.restarts = 1(?s:.*)reward r 0 was here"
    ):
        await comeback.up(first)
    assert done == ["born", "ended", "born", "ended"]
    comeback, first, done = comeback_of(supervisor_of(enabled=False)[0], ProcessDied(DIED))
    with pytest.raises(ProcessDied, match="likely cause: killed by a signal"):
        await comeback.up(first)
    for refusal in (ConfigError("no such reward"), EngineError("the engine could not start"), StateLost("no trainer")):
        comeback, first, done = comeback_of(supervisor_of()[0], refusal)
        with pytest.raises(type(refusal), match=str(refusal)):
            await comeback.up(first)
        assert done == ["born"]


def test_where_there_is_nothing_to_go_on_from_the_first_fault_is_the_last() -> None:
    supervisor, _, events = supervisor_of()
    with pytest.raises(ProcessDied, match=f"the trainer rank 0 process ended while the run started: {DIED}"):
        supervisor.fault(Fault(kind="trainer", process="trainer rank 0", reason=DIED), last=True)
    assert events[0][1]["final"] == 1


class Client:
    """An engine that is lost after some answers, where told so."""

    def __init__(self, name: str, *, lives: int = 1000) -> None:
        self.name, self.lives = name, lives
        self.url, self.version = f"http://{name}", -1
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, request: GenerateRequest, *, weight_version: int | None = None) -> Answer:
        assert self.version == (weight_version if weight_version is not None else -1)
        self.asked.append(tuple(request.seeds or ()))
        await asyncio.sleep(0)
        self._live()
        return ANSWER

    async def update_weights(self, manifest: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        self._live()
        self.version = manifest["version"]
        return {"version": manifest["version"], "num_applied": 0, "digest": "d" * 8}

    async def check_prompts(self, prompts: list[str], *, max_sequence_length: int) -> list[str]:
        return [f"{prompt} of {max_sequence_length}" for prompt in prompts]

    def _live(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise EngineError(f"engine {self.name} dropped /rollout/generate")

    async def close(self) -> None:
        pass


class Owner:
    """In the place of a cluster."""

    def __init__(self, *, holds_weights: bool = True, after_s: float = 0.0, fails: Exception | None = None) -> None:
        self.made: list[int] = []
        self.may = asyncio.Event()
        """An engine comes back no sooner."""
        self.may.set()
        self.pool: EnginePool | None = None
        self._holds_weights, self._after_s, self._fails = holds_weights, after_s, fails

    async def is_lost(self, client: Client, error: Exception) -> bool:
        return client.lives < 0

    async def replace(self, index: int, error: Exception) -> tuple[Client, bool]:
        self.made.append(index)
        await asyncio.sleep(self._after_s)
        await self.may.wait()
        if self._fails is not None:
            raise self._fails
        client = Client(f"again {index}")
        client.version = 0
        return client, self._holds_weights


MANIFEST = {"version": 0, "buckets": [], "digest": "d" * 8}


async def pool_of(owner: Owner, *clients: Client) -> EnginePool:
    pool = EnginePool(clients, per_engine=8, mender=owner)  # type: ignore[arg-type]
    await pool.sync(MANIFEST)
    return pool


@on_a_loop
async def test_requests_of_a_lost_engine_are_made_again_once_each_with_their_seeds() -> None:
    owner, lost = Owner(after_s=0.01), Client("lost", lives=2)
    pool = await pool_of(owner, lost)
    tasks = [task_of(group, 0) for group in range(4)]
    assert await asyncio.gather(*map(pool.generate, tasks)) == [ANSWER] * 4
    assert owner.made == [0]
    answered = [seat.client for seat in pool._seats]
    assert answered[0].asked == [(0, 1)] * 3  # type: ignore[attr-defined]
    assert pool.metrics()["supervision/reissued"] == 3.0
    assert "supervision/reissued" not in pool.metrics()


@on_a_loop
async def test_another_engine_takes_over_while_the_lost_one_comes_back() -> None:
    owner, lost, other = Owner(), Client("lost", lives=1), Client("other")
    owner.may.clear()
    pool = await pool_of(owner, lost, other)
    async with asyncio.timeout(60):  # for ever, if they waited for the lost one
        await asyncio.gather(*(pool.generate(task_of(group, 0)) for group in range(6)))
    assert len(other.asked) == 6
    assert owner.made == [0]
    assert pool._seats[0].state != "ready"
    owner.may.set()
    await pool.settled()
    assert [seat.state for seat in pool._seats] == ["ready", "ready"]


@on_a_loop
async def test_the_failure_of_a_request_alone_is_its_own() -> None:
    class Refusing(Client):
        def _live(self) -> None:
            if self.version == 0:
                raise EngineError("samples are not finite")

    owner = Owner()
    with pytest.raises(EngineError, match="not finite"):
        await (await pool_of(owner, Refusing("one"))).generate(task_of(0, 0))
    assert owner.made == []


@on_a_loop
async def test_where_the_weights_of_an_engine_are_gone_the_state_is_lost_until_the_next_sync() -> None:
    owner = Owner(holds_weights=False)
    pool = await pool_of(owner, Client("lost", lives=1))
    with pytest.raises(StateLost):
        await pool.generate(task_of(0, 0))
    assert await pool.check_prompts(["a cat"], max_sequence_length=8) == ["a cat of 8"]  # which needs no weights
    await pool.sync(MANIFEST)
    assert await pool.generate(task_of(0, 0)) is ANSWER


@on_a_loop
async def test_what_ends_the_run_comes_out_of_the_request_that_waits() -> None:
    owner = Owner(fails=ProcessDied("the engine 0 process ended 4 times"))
    pool = await pool_of(owner, Client("lost", lives=1))
    with pytest.raises(ProcessDied, match="4 times"):
        await pool.generate(task_of(0, 0))
    assert await pool.abandoned() == [0]
    await pool.put(0, Client("new"))  # type: ignore[arg-type]
    await pool.sync(MANIFEST)
    assert await pool.generate(task_of(0, 0)) is ANSWER


@on_a_loop
async def test_an_engine_that_is_lost_in_a_sync_is_mended_and_the_sync_made_again() -> None:
    owner, lost, other = Owner(holds_weights=False), Client("lost", lives=0), Client("other")
    pool = EnginePool([lost, other], per_engine=8, mender=owner)  # type: ignore[list-item]
    with pytest.raises(EngineError) as raised:
        await pool.sync(MANIFEST)
    assert await pool.mend(raised.value)
    assert await pool.sync(MANIFEST) == MANIFEST["digest"]
    assert not await pool.mend(SyncError("refused"))
    assert owner.made == [0]


class Trainer:
    """In the place of the trainer's ranks."""

    def __init__(self) -> None:
        self.busy, self.state, self.digest = asyncio.Lock(), 0, "d" * 8
        self.receivers: list[int] = []
        self.published = 0

    async def publish(self, version: int, *, ema: bool, receivers: int) -> list[dict[str, Any]]:
        self.receivers.append(receivers)
        self.published += 1
        return [{"version": version, "buckets": [], "digest": self.digest}]

    async def unpublish(self) -> None:
        self.published -= 1


@on_a_loop
async def test_one_engine_gets_what_all_of_them_hold_or_nothing() -> None:
    trainer, back = Trainer(), Client("back")
    hand_over = HandOver(trainer, num_engines=2, per_engine=3)  # type: ignore[arg-type]
    assert await hand_over.to_one(0, back)  # type: ignore[arg-type]
    assert (back.version, trainer.receivers) == (-1, [])  # nothing was handed over yet, so nothing is missing
    pool = EnginePool([Client("one"), Client("two")], per_engine=1)  # type: ignore[list-item]
    await hand_over.to_all(pool, 4, ema=False)
    assert await hand_over.to_one(1, back)  # type: ignore[arg-type]
    assert (back.version, trainer.receivers, trainer.published) == (4, [6, 3], 0)
    trainer.state += 1
    assert not await hand_over.to_one(1, back)  # type: ignore[arg-type]
    trainer.state -= 1
    trainer.digest = "e" * 8
    with pytest.raises(InvariantError, match="version 4 were dddddddd"):
        await hand_over.to_one(1, Client("last"))  # type: ignore[arg-type]


class Method:
    """Of an actor: raises what it is told to, or returns it."""

    def __init__(self, outcome: Any, after_s: float = 0.0) -> None:
        self._outcome, self._after_s = outcome, after_s

    def remote(self, *args: Any) -> Awaitable[Any]:
        async def answer() -> Any:
            await asyncio.sleep(self._after_s)
            if isinstance(self._outcome, Exception):
                raise self._outcome
            return self._outcome

        return asyncio.ensure_future(answer())


class Rank:
    def __init__(self, update: Method) -> None:
        self.update, self.host = update, Method("another host")


async def updated(*ranks: Rank) -> tuple[TrainerGroup, BaseException | None]:
    group = TrainerGroup(ranks)
    await group.locate()
    try:
        await group.update([[] for _ in ranks])
    except (StateLost, RuntimeError) as error:
        return group, error
    return group, None


@on_a_loop
async def test_the_end_of_a_rank_is_the_loss_of_the_state() -> None:
    group, error = await updated(Rank(Method("metrics")), Rank(Method("others")))
    assert (error, group.state, group.lost, group.has_work) == (None, 1, {}, False)

    group, error = await updated(Rank(Method(ProcessDied("rank 0 was killed"))), Rank(Method("others")))
    assert isinstance(error, StateLost)
    assert group.lost == {"trainer rank 0": "rank 0 was killed"}

    group, error = await updated(Rank(Method(torch.OutOfMemoryError("CUDA out of memory"))))
    assert isinstance(error, StateLost)
    assert likely_cause(group.lost["trainer rank 0"], []).startswith("out of GPU memory")

    # A rank notices that its neighbour is gone before anybody has said so.
    broken = RuntimeError("Connection closed by peer")
    group, error = await updated(Rank(Method(broken)), Rank(Method(ProcessDied("rank 1 was killed"), after_s=0.02)))
    assert isinstance(error, StateLost)
    assert group.lost == {"trainer rank 1": "rank 1 was killed"}

    group, error = await updated(Rank(Method(broken)), Rank(Method("others")))
    assert error is broken  # nobody was lost: a fault of the program
