"""The exported trace, parsed again: every thread's slices nest, and every lane of the run is there."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from cli_fixtures import here

from verst.obs import spans
from verst.obs.events import EventLog
from verst.obs.spans import FILE, Span, Spans
from verst.obs.trace import trace_events, write_trace


def recorded(run: Path) -> list[Span]:
    """Two engines, the first of which joins two requests in a batch; a parser, two reward workers, two iterations."""
    log = EventLog(run / "events" / FILE, flush_s=3600)
    taken = Spans(log)
    t = 1000.0
    for iteration in (1, 2):
        for phase, start, end in (
            ("publish", 30.0, 31.0),
            ("update", 31.0, 33.0),
            ("sync", 30.0, 33.0),
            ("wait", 0.0, 20.0),
            ("advantages", 20.0, 20.0),
            ("iteration", 0.0, 35.0),
        ):
            taken.add(phase, start_s=t + start, end_s=t + end, lane="driver:0", iteration=iteration)
        taken.add("train", start_s=t + 20, end_s=t + 30, lane="trainer:0", iteration=iteration)
        taken.add("rollout", start_s=t, end_s=t + 20, rollout=iteration - 1)
        for group, engine in enumerate((0, 0, 1)):
            with spans.of(rollout=iteration - 1, group=group, index=0, samples=2):
                _microgroup(taken, t, engine, group)
        t += 40
    log.close()
    return spans.read_spans(run)


def _microgroup(taken: Spans, t: float, engine: int, group: int) -> None:
    lane = f"engine:{engine}"
    taken.add("engine_wait", start_s=t, end_s=t + 1)
    for stage, start, end in (("queue", 1, 2), ("encode", 2, 3), ("denoise", 3, 6), ("decode", 6 + group, 7 + group)):
        taken.add(stage, start_s=t + start, end_s=t + end, lane=lane, batch=5)
    taken.add("request", start_s=t + 1, end_s=t + 9, lane=lane, batch=5)
    taken.add("transfer", start_s=t + 9, end_s=t + 10)
    taken.add("generate", start_s=t, end_s=t + 10)
    taken.add("parse_wait", start_s=t + 10, end_s=t + 10.5 + group)
    taken.add("parse", start_s=t + 10.5 + group, end_s=t + 11.5 + group, lane="parser:0")
    taken.add("deserialize", start_s=t + 10, end_s=t + 11.5 + group)
    taken.add("reward_wait", start_s=t + 11.5 + group, end_s=t + 14, reward="ocr")
    taken.add("score", start_s=t + 14, end_s=t + 18, lane=f"reward/ocr:{group % 2}", reward="ocr")
    taken.add("reward", start_s=t + 11.5 + group, end_s=t + 18)
    taken.add("group_wait", start_s=t + 18, end_s=t + 20)


def threads(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(process, thread) by name -> its slices, in order."""
    names = {(e["name"], e["pid"], e.get("tid")): e["args"].get("name") for e in events if e["ph"] == "M"}
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            process = names["process_name", event["pid"], None]
            found[process, names["thread_name", event["pid"], event["tid"]]].append(event)
    return {track: sorted(slices, key=lambda e: (e["ts"], -e["dur"])) for track, slices in found.items()}


def assert_nested(slices: list[dict[str, Any]]) -> None:
    ends: list[int] = []
    for one in slices:
        while ends and ends[-1] <= one["ts"]:
            ends.pop()
        end = one["ts"] + one["dur"]
        assert one["dur"] >= 0
        assert not ends or end <= ends[-1], (one, ends)
        ends.append(end)


def test_every_lane_has_its_thread_and_slices_nest(tmp_path: Path) -> None:
    write_trace(recorded(tmp_path), tmp_path / "out" / "trace.json")
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    found = threads(events)
    for slices in found.values():
        assert_nested(slices)
    assert {track: len(slices) for track, slices in found.items() if track[0] != "microgroups"} == {
        ("driver", "phases"): 12,
        ("rollouts", "rollouts"): 2,
        ("trainer", "trainer 0"): 2,
        ("engine 0", "device"): 8,  # two requests share encode and denoise
        ("engine 0", "requests"): 10,
        ("engine 0", "requests (2)"): 10,
        ("engine 1", "device"): 6,
        ("engine 1", "requests"): 10,
        ("parser", "parser 0"): 6,
        ("reward ocr", "ocr 0"): 2,
        ("reward ocr", "ocr 0 (2)"): 2,  # group 2 had it at the same time as group 0
        ("reward ocr", "ocr 1"): 2,
        **{("reward ocr", name): 2 for name in ("waiting", "waiting (2)", "waiting (3)")},
    }
    lanes = [slices for track, slices in found.items() if track[0] == "microgroups"]
    assert [len(slices) for slices in lanes] == [16, 16, 16]  # itself and seven stages, twice
    whole = lanes[0][0]
    assert (whole["name"], whole["ts"], whole["dur"], whole["args"]["samples"]) == ("0:0.0", 0, 20_000_000, 2)


def test_what_a_resumed_run_made_again_is_not_stretched_over_the_break(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events" / FILE)
    taken = Spans(log)
    for t in (0.0, 500.0):
        with spans.of(rollout=3, group=0, index=0):
            _microgroup(taken, t, 0, 0)
    log.close()
    for (process, _), slices in threads(list(trace_events(spans.read_spans(tmp_path)))).items():
        assert_nested(slices)
        if process == "microgroups":
            assert [e["dur"] for e in slices if e["name"] == "3:0.0"] == [20_000_000, 20_000_000]


def test_the_command_writes_it_into_the_run_folder(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    run = tmp_path / "run"
    number = len(recorded(run))
    assert here(monkeypatch, "trace", run) == 0
    assert f"{run / 'trace.json'}: {number} spans" in capsys.readouterr().out
    assert json.loads((run / "trace.json").read_text())["displayTimeUnit"] == "ms"
    assert here(monkeypatch, "trace", tmp_path / "nothing") == 2
    assert "is missing or holds no spans" in capsys.readouterr().err
