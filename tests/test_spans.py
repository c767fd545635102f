"""Spans of a run: what is taken down, read back, and summed up as metrics. Numbers are counted by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from engine_fixtures import folder as folder
from engine_fixtures import request
from loop_fixtures import on_a_loop
from test_pipeline import PLACES, TASKS, Stages, scores_of, task_of

from verst.config.rewards import PythonReward
from verst.engine.client import EngineClient
from verst.engine.server import EngineServer
from verst.engine.wire import decode_response
from verst.obs import spans
from verst.obs.events import EventLog
from verst.obs.spans import FILE, STARTED, Span, Spans, lane_of, read_spans
from verst.obs.stage_times import covered_s, most_at_a_time, percentiles
from verst.rewards.base import RewardBatch
from verst.rewards.pool import RewardPool
from verst.rollout.engines import EnginePool
from verst.rollout.plan import MicrogroupTask
from verst.types import Microgroup, Scores
from verst.web.timing import AnswerTimes, Clocks, ServerTimes, Stopwatch


def log_in(run: Path, **options: int) -> EventLog:
    return EventLog(run / "events" / FILE, flush_s=3600, **options)


def by_name(found: list[Span], name: str) -> list[Span]:
    return [span for span in found if span.name == name]


@on_a_loop
async def test_a_microgroup_goes_through_its_stages_one_after_the_other(tmp_path: Path) -> None:
    class Judged(Stages):
        def __init__(self, taken: Spans) -> None:
            super().__init__()
            self.taken = taken

        async def judge(self, task: MicrogroupTask, microgroup: Microgroup) -> Scores:
            with self.taken.span("score", lane=lane_of("reward/ocr", 1), reward="ocr"):
                await asyncio.sleep(0)
            return scores_of(microgroup)

    log = log_in(tmp_path)
    taken = Spans(log)
    stages = Judged(taken)
    before = time.time()
    await stages.pipeline(spans=taken, score=stages.judge).run(TASKS, weight_version=0)
    log.close()
    found = read_spans(tmp_path)
    names = ("generate", "deserialize", "reward", "score", "group_wait")
    assert Counter(span.name for span in found) == dict.fromkeys(names, len(TASKS))
    for place in PLACES:
        own = {span.name: span for span in found if span.microgroup == (0, *place)}
        chain = [own[name] for name in ("generate", "deserialize", "reward", "group_wait")]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(chain))
        assert own["reward"].start_s <= own["score"].start_s <= own["score"].end_s <= own["reward"].end_s
        assert (own["score"].lane, own["score"].kind, own["score"].more["reward"]) == (
            "reward/ocr:1",
            "reward/ocr",
            "ocr",
        )
        assert own["generate"].more["samples"] == 2
        assert own["generate"].lane is None
    assert len({span.end_s for span in by_name(found, "group_wait")}) == 1  # all are complete at once
    assert before - 1 < found[0].start_s < time.time() + 1


def test_what_failed_says_so_and_is_raised(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    taken = Spans(log)
    with pytest.raises(KeyError), spans.of(rollout=3), taken.span("train", lane="trainer:0", iteration=4):
        raise KeyError("x")
    taken.add("sync", start_s=1.0, end_s=3.5)
    log.close()
    train, sync = by_name(read_spans(tmp_path), "train") + by_name(read_spans(tmp_path), "sync")
    assert (train.error, train.rollout, train.iteration, train.microgroup) == ("KeyError", 3, 4, None)
    assert (sync.error, sync.rollout) == (None, None)
    assert sync.seconds == pytest.approx(2.5, abs=1e-6)


def test_ten_thousand_microgroups_stay_within_the_bound(tmp_path: Path) -> None:
    log = log_in(tmp_path, max_bytes=200_000)
    taken = Spans(log)
    for group in range(10_000):
        taken.add("generate", start_s=group, end_s=group + 1, rollout=0, group=group, index=0)
    log.close()
    sizes = [path.stat().st_size for path in (tmp_path / "events").iterdir()]
    assert len(sizes) == 2
    assert sum(sizes) < 2 * 200_200
    groups = [span.group for span in read_spans(tmp_path)]
    assert groups == list(range(10_000 - len(groups), 10_000))


def test_what_the_newest_process_did_can_be_read_alone(tmp_path: Path) -> None:
    for number in range(3):
        log = log_in(tmp_path)
        log.event(STARTED)
        Spans(log).add("train", start_s=number, end_s=number + 1, iteration=number)
        log.close()
    assert [span.iteration for span in read_spans(tmp_path)] == [0, 1, 2]
    assert [span.iteration for span in read_spans(tmp_path, newest=True)] == [2]


def test_metrics_of_stages_and_lanes() -> None:
    taken = Spans(capacity={"engine": 2, "parser": 1, "trainer": 1})
    now = time.monotonic()
    for number, seconds in enumerate((1.0, 2.0, 3.0, 4.0)):
        taken.add("generate", start_s=now, end_s=now + seconds, rollout=0, group=0, index=number)
    taken.add("generate", start_s=now, end_s=now + 99.0, rollout=spans.HELDOUT, group=0, index=0)
    # Engine 0 is busy for 3 s in all, two requests sharing one batch; what the driver saw of it is no further work.
    for start, end in ((0.0, 2.0), (0.0, 2.0), (5.0, 6.0)):
        taken.add("denoise", start_s=now + start, end_s=now + end, lane="engine:0", rollout=0, batch=1)
    taken.add("request", start_s=now, end_s=now + 9.0, lane="engine:0", rollout=0, batch=1)
    # Engine 1 says nothing of itself.
    taken.add("request", start_s=now, end_s=now + 2.0, lane="engine:1", rollout=0)
    for start, end in ((0.0, 2.0), (1.0, 3.0), (2.0, 4.0)):
        taken.add("reward_wait", start_s=now + start, end_s=now + end, rollout=0, reward="ocr")
        taken.add("parse_wait", start_s=now + start, end_s=now + end, rollout=0)
    assert taken.longest_stage_s(0) == pytest.approx((3.0 + 2.0) / 2)
    assert taken.longest_stage_s(0) == 0.0
    values = taken.metrics()
    assert values["perf/stage/generate/mean_s"] == pytest.approx(2.5)
    assert [values[f"perf/stage/generate/p{p}_s"] for p in (50, 95, 99)] == pytest.approx([2.0, 4.0, 4.0])
    assert values["perf/parser/max_queue"] == 2
    assert "perf/reward/ocr/max_queue" not in values  # the pool says it, in samples
    assert values["perf/parser/utilisation"] == 0.0
    ratio = values["perf/reward/ocr/mean_queue"] / values["perf/engine/utilisation"]
    assert ratio == pytest.approx(6.0 / 2.5)  # both over the same time, which the clock decides
    assert set(taken.metrics()) == {f"perf/{kind}/utilisation" for kind in ("engine", "parser", "trainer")}


def test_arithmetic_of_intervals() -> None:
    assert covered_s([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == 4.0
    assert covered_s([]) == 0.0
    assert most_at_a_time([(0, 2), (1, 3), (2, 4)]) == 2
    assert percentiles([4, 1, 3, 2], (50, 95, 99, 25)) == [2, 4, 4, 1]


def test_what_a_server_says_is_put_in_the_middle_of_what_its_client_saw() -> None:
    watch = Stopwatch()
    origin = time.perf_counter()
    watch.add("queue", origin, origin + 0.25)
    watch.add("denoise", origin + 0.25, origin + 1.0)
    watch.batch = 17
    said = ServerTimes.of(watch.header())
    assert said is not None
    assert said.batch == 17
    assert said.stages["denoise"][0] - said.stages["queue"][0] == pytest.approx(0.25, abs=2e-6)
    assert said.stages["denoise"][1] - said.stages["denoise"][0] == pytest.approx(0.75, abs=2e-6)
    watch.add("decode", origin + 1 / 3, origin + 2 / 3)
    watch.add("ship", origin + 2 / 3, origin + 0.9)
    again = ServerTimes.of(watch.header())
    assert again is not None
    assert again.stages["decode"][1] == again.stages["ship"][0]  # or they would overlap in a trace
    said = ServerTimes.of("queue;dur=250;start=100, denoise;dur=750;start=350, total;dur=1200")
    assert said is not None
    arrived_s = Clocks().arrived(said, sent_s=50.0, answered_s=51.4)
    times = AnswerTimes(sent_s=50.0, answered_s=51.4, received_s=60.0, server=said, arrived_s=arrived_s)
    assert times.stages() == {"queue": pytest.approx((50.2, 50.45)), "denoise": pytest.approx((50.45, 51.2))}


@pytest.mark.parametrize(
    "header",
    [None, "", "cache;desc=hit", "total;dur=x", "total", "queue;dur=1;start=0", "q;dur=inf;start=1, total;dur=1"],
)
def test_other_servers_may_say_anything(header: str | None) -> None:
    assert ServerTimes.of(header) is None
    assert AnswerTimes(sent_s=1.0, answered_s=2.0, received_s=3.0).stages() == {}


def test_no_stage_is_outside_its_request() -> None:
    said = ServerTimes.of("queue;dur=900;start=0, denoise;dur=900;start=900, total;dur=1800")
    stages = AnswerTimes(sent_s=1.0, answered_s=2.0, received_s=3.0, server=said, arrived_s=0.6).stages()
    assert stages == {"queue": pytest.approx((1.0, 1.5)), "denoise": pytest.approx((1.5, 2.0))}


def test_the_exchange_with_the_least_time_on_the_way_sets_a_clock() -> None:
    clocks = Clocks()

    def arrived(server_s: float, *, there_s: float, back_s: float, at_s: float) -> float:
        """Of a request that was at the server for a second; its clock is 900 s behind."""
        said = ServerTimes.of(f'total;dur=1000, clock;desc="c/{round(1e6 * server_s)}"')
        assert said is not None
        return clocks.arrived(said, sent_s=at_s - there_s, answered_s=at_s + 1 + back_s)

    assert arrived(100.0, there_s=0.5, back_s=0.1, at_s=1000.0) == pytest.approx(1000.0 - 0.2)
    assert arrived(101.0, there_s=0.01, back_s=0.01, at_s=1001.0) == pytest.approx(1001.0)
    assert arrived(102.0, there_s=0.5, back_s=0.1, at_s=1002.0) == pytest.approx(1002.0)  # as the one before says
    assert arrived(103.0, there_s=0.0, back_s=0.004, at_s=1003.0) == pytest.approx(1003.002)
    # Clocks part: after long enough a worse exchange is the better one.
    assert arrived(50_000.0, there_s=0.5, back_s=0.1, at_s=50_900.0) == pytest.approx(50_900.0 - 0.2)


def test_an_engine_says_when_it_did_what_and_the_pool_takes_it_down(folder: Path, tmp_path: Path) -> None:
    server = EngineServer(folder)
    server.start()
    server.wait_ready(60)
    log = log_in(tmp_path)

    async def ask() -> None:
        taken = Spans(log)
        pool = EnginePool([EngineClient(server.url)], per_engine=1, spans=taken)

        async def one(group: int) -> None:
            task = task_of(group, 0)
            task = dataclasses.replace(task, request=request())
            with spans.of(rollout=0, group=group, index=0):
                answer = await pool.generate(task)
            assert "timings" not in decode_response(answer)[0]

        await asyncio.gather(one(0), one(1))
        await pool.close()

    try:
        asyncio.run(ask())
    finally:
        server.stop()
    log.close()
    found = read_spans(tmp_path)
    chain = ("engine_wait", "queue", "encode", "denoise", "decode", "ship", "transfer")
    for group in (0, 1):
        own = {span.name: span for span in found if span.microgroup == (0, group, 0)}
        assert set(own) == {*chain, "request"}
        assert all(own[a].end_s <= own[b].start_s + 1e-3 for a, b in itertools.pairwise(chain))
        assert {own[name].lane for name in (*chain[1:-1], "request")} == {"engine:0"}
        assert own["request"].start_s <= own["queue"].start_s
        assert own["ship"].end_s <= own["request"].end_s
    batches = [span.more["batch"] for span in by_name(found, "denoise")]
    assert len(set(batches)) == 2  # deterministic: one request a batch
    first, second = by_name(found, "request")
    waits = {span.group: span for span in by_name(found, "engine_wait")}
    assert waits[second.group or 0].end_s >= first.end_s  # one place, and the first had it


@on_a_loop
async def test_waits_for_reward_workers_and_their_calls(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    taken = Spans(log)

    async def judge(batch: RewardBatch) -> list[float]:
        await asyncio.sleep(0.002)
        return [0.5] * len(batch)

    config = PythonReward(path="a:b", name="ocr", workers=2, merge_size=4, merge_wait_ms=10_000)
    pool = RewardPool(config, judge, deterministic=False, on_span=taken.add)

    async def one(group: int) -> None:
        with spans.of(rollout=0, group=group, index=0, samples=2):
            await pool.score(RewardBatch.plain(torch.zeros(2, 1, 2, 2, 3, dtype=torch.uint8), ("a", "b")))

    await asyncio.gather(*(one(group) for group in range(4)))
    log.close()
    found = read_spans(tmp_path)
    assert sorted(span.group or 0 for span in by_name(found, "reward_wait")) == [0, 1, 2, 3]
    calls = by_name(found, "score")
    assert [(call.lane, call.more["samples"], call.group) for call in calls] == [
        ("reward/ocr:0", 4, 0),
        ("reward/ocr:1", 4, 2),
    ]
    for wait in by_name(found, "reward_wait"):
        assert wait.more["reward"] == "ocr"
        assert wait.end_s <= calls[(wait.group or 0) // 2].start_s + 1e-6
