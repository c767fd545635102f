"""Spans of a run: what is taken down, read back, and summed up as metrics. Numbers are counted by hand."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from pathlib import Path

import pytest
from loop_fixtures import on_a_loop
from test_pipeline import PLACES, TASKS, Stages, scores_of

from verst.obs import spans
from verst.obs.events import EventLog
from verst.obs.spans import FILE, Span, Spans, lane_of, read_spans
from verst.obs.stage_times import covered_s, most_at_a_time, percentiles
from verst.rollout.plan import MicrogroupTask
from verst.types import Microgroup, Scores


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
    assert taken.longest_stage_s(0) == pytest.approx((3.0 + 2.0) / 2)
    assert taken.longest_stage_s(0) == 0.0
    values = taken.metrics()
    assert values["perf/stage/generate/mean_s"] == pytest.approx(2.5)
    assert [values[f"perf/stage/generate/p{p}_s"] for p in (50, 95, 99)] == pytest.approx([2.0, 4.0, 4.0])
    assert values["perf/reward/ocr/max_queue"] == 2
    assert values["perf/parser/utilisation"] == 0.0
    ratio = values["perf/reward/ocr/mean_queue"] / values["perf/engine/utilisation"]
    assert ratio == pytest.approx(6.0 / 2.5)  # both over the same time, which the clock decides
    assert set(taken.metrics()) == {f"perf/{kind}/utilisation" for kind in ("engine", "parser", "trainer")}


def test_arithmetic_of_intervals() -> None:
    assert covered_s([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == 4.0
    assert covered_s([]) == 0.0
    assert most_at_a_time([(0, 2), (1, 3), (2, 4)]) == 2
    assert percentiles([4, 1, 3, 2], (50, 95, 99, 25)) == [2, 4, 4, 1]
