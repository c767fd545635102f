"""Triage of runs whose bottleneck is known, and whose gains are what the same run takes with the knob really turned."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import here
from run_fixtures import write_recipe

from verst.errors import ConfigError
from verst.obs.events import EventLog
from verst.obs.simulation import RewardStage, Run
from verst.obs.spans import FILE, Span, Spans, read_spans
from verst.obs.triage import Finding, Setup, Triage, triage


@dataclass(frozen=True, kw_only=True)
class Plant:
    """All times in seconds."""

    engines: int = 2
    parsers: int = 1
    workers: int = 1
    groups: int = 8
    group_size: int = 8
    microgroup: int = 2
    work_s: float = 0.5
    """Of an engine for a sample."""
    gap_s: float = 0.0
    """Of an engine for a request, whatever is in it."""
    parse_s: float = 0.005
    """For a sample."""
    score_s: float = 0.02
    """For a sample."""
    train_s: float = 1.0
    sync_s: float = 0.2
    evaluate_s: float = 0.0
    ahead: int = 0
    """Rollouts that are begun before they are needed, at most 1."""

    def spans(self, iterations: int = 4) -> list[Span]:
        found: list[Span] = []
        now, ends = 1000.0, list[float]()
        for iteration in range(1, iterations + 1):
            begun = now
            for rollout in range(len(ends), iteration + self.ahead):
                ends.append(self._rollout(found, rollout, max([begun, *ends])))
            ready = max(begun, ends[iteration - 1])
            marks = [("wait", begun, ready), ("train", ready, ready + self.train_s)]
            # Scored is generated, near enough.
            marks += [("drain", marks[-1][2], max(marks[-1][2], ends[-1]))]
            marks += [("sync", marks[-1][2], marks[-1][2] + self.sync_s)]
            marks += [("evaluate", marks[-1][2], marks[-1][2] + self.evaluate_s)]
            now = marks[-1][2]
            for name, start, end in [*marks, ("iteration", begun, now)]:
                lane = "trainer:0" if name == "train" else "driver:0"
                found.append(Span(name=name, start_s=start, end_s=end, lane=lane, iteration=iteration))
        return sorted(found, key=lambda span: (span.start_s, -span.end_s))

    def _rollout(self, found: list[Span], rollout: int, begun: float) -> float:
        """First come, first served at every stage."""
        free = {
            "engine": [begun] * self.engines,
            "parser": [begun] * self.parsers,
            "reward/ocr": [begun] * self.workers,
        }
        per_group = self.group_size // self.microgroup
        size, ended = self.microgroup, begun
        names = [
            {"rollout": rollout, "group": group, "index": i * size}
            for group in range(self.groups)
            for i in range(per_group)
        ]

        def work(kind: str, ready: float, seconds: float) -> tuple[str, float, float]:
            lane = min(range(len(free[kind])), key=free[kind].__getitem__)
            start = max(ready, free[kind][lane])
            free[kind][lane] = start + seconds
            return f"{kind}:{lane}", start, start + seconds

        for number, named in enumerate(names):

            def add(
                name: str, start: float, end: float, lane: str | None = None, named: Any = named, **more: Any
            ) -> None:
                more = {"samples": size, **more}
                found.append(Span(name=name, start_s=start, end_s=end, lane=lane, **named, more=more))

            lane, start, generated = work("engine", begun, self.gap_s + self.work_s * size)
            add("request", begun, generated, lane, batch=number)
            add("queue", begun, start, lane, batch=number)
            add("denoise", start + self.gap_s, generated, lane, batch=number)
            parser, start, parsed = work("parser", generated, self.parse_s * size)
            add("parse_wait", generated, start)
            add("parse", start, parsed, parser)
            worker, start, scored = work("reward/ocr", parsed, self.score_s * size)
            add("reward_wait", parsed, start, reward="ocr")
            add("score", start, scored, worker, reward="ocr")
            add("reward", parsed, scored)
            ended = max(ended, scored)
        found.append(Span(name="rollout", start_s=begun, end_s=ended, rollout=rollout))
        return ended

    def setup(self, **changes: Any) -> Setup:
        run = Run(
            num_groups=self.groups,
            group_size=self.group_size,
            microgroup_size=self.microgroup,
            staleness=self.ahead,
        )
        rewards = {"ocr": RewardStage(workers=self.workers)}
        return Setup(**{"run": run, "engines": self.engines, "parsers": self.parsers, "rewards": rewards, **changes})

    def iteration_s(self) -> float:
        spans = [span for span in self.spans() if span.name == "iteration"]
        return spans[-1].seconds

    def triage(self, **changes: Any) -> Triage:
        return triage(self.spans(), self.setup(**changes))


def knob(found: Triage, name: str) -> Finding:
    return next(finding for finding in found.findings if finding.knob == name)


def turned(plant: Plant, **changes: Any) -> float:
    """Seconds that an iteration is really shorter with this changed."""
    return plant.iteration_s() - dataclasses.replace(plant, **changes).iteration_s()


def test_a_slow_reward() -> None:
    plant = Plant(score_s=1.0)
    found = plant.triage()
    assert found.bottleneck == "reward/ocr"
    first = found.findings[0]
    assert (first.knob, first.change, first.needs_devices) == ("rewards.0.workers", "1 -> 4", False)
    assert first.gain_s == pytest.approx(turned(plant, workers=4), rel=0.02)
    assert first.gain == pytest.approx(first.gain_s / found.iteration_s)
    last = {"waiting for an engine": 15.0, "engine": 1.0, "parser": 0.01, "rewards": 2.0, "waiting for a parser": 0.01}
    assert found.path == pytest.approx(
        {**last, "waiting for reward ocr": found.rollout_s - sum(last.values())}, abs=1e-6
    )
    uses = {use.name: use for use in found.uses}
    assert uses["reward/ocr"].busy_s == pytest.approx(64 * 1.0)
    assert uses["engine"].utilisation == pytest.approx(64 * 0.5 / 2 / found.iteration_s)


def test_a_slow_parser() -> None:
    plant = Plant(parse_s=0.6)
    found = plant.triage()
    assert found.bottleneck == "parser"
    first = found.findings[0]
    assert (first.knob, first.change) == ("rollout.parsers.num", "1 -> 4")
    assert first.gain_s == pytest.approx(turned(plant, parsers=4), rel=0.05)
    assert found.path["waiting for a parser"] > found.path["engine"]


def test_one_engine() -> None:
    plant = Plant(engines=1)
    found = plant.triage()
    assert found.bottleneck == "engine"
    another = knob(found, "engine.num")
    assert (another.change, another.needs_devices) == ("1 -> 2", True)
    assert another.gain_s == pytest.approx(turned(plant, engines=2), rel=0.02)
    assert {finding.knob for finding in found.findings} == {"engine.num"}  # nothing else would help


def test_tiny_microgroups() -> None:
    plant = Plant(microgroup=1, work_s=0.1, gap_s=0.4)
    found = plant.triage()
    assert found.bottleneck == "engine"
    larger = knob(found, "rollout.microgroup_size")
    assert found.findings[0] == larger  # it costs nothing
    assert larger.change == "1 -> 8"
    assert larger.gain_s == pytest.approx(turned(plant, microgroup=8), rel=0.02)
    assert "80% of the engines' time" in larger.why


def test_smaller_microgroups_where_engines_run_out_of_them() -> None:
    plant = Plant(engines=3, groups=4, group_size=8, microgroup=8)
    found = plant.triage()
    smaller = knob(found, "rollout.microgroup_size")
    assert smaller.gain_s > 0
    size = int(smaller.change.split(" -> ")[1])
    assert size < 8
    assert smaller.gain_s == pytest.approx(turned(plant, microgroup=size), rel=0.02)


def test_bound_by_the_trainer() -> None:
    plant = Plant(train_s=40.0)
    found = plant.triage()
    assert next(use.busy_s for use in found.uses if use.name == "trainer") == pytest.approx(40.0)
    assert found.bottleneck == "trainer"
    assert found.findings[0].knob == "schedule.type"
    rollout_s = 64 * 0.5 / 2
    assert found.findings[0].gain_s == pytest.approx(rollout_s, rel=0.05)
    assert knob(found, "trainer.ranks").gain_s == pytest.approx(20.0, rel=0.01)
    assert "schedule.type" not in {finding.knob for finding in plant.triage(may_overlap=False).findings}


@pytest.mark.parametrize(
    ("train_s", "bottleneck", "keys"), [(10.0, "engine", "engine.num"), (40.0, "trainer", "trainer.ranks")]
)
def test_an_asynchronous_run_is_bound_by_the_longer_of_the_two(train_s: float, bottleneck: str, keys: str) -> None:
    plant = Plant(train_s=train_s, ahead=1)
    rollout_s = 64 * 0.5 / 2 + 2 * 0.005 + 2 * 2 * 0.02  # engines, and the last of both to be decoded and scored
    assert plant.iteration_s() == pytest.approx(max(rollout_s, train_s) + plant.sync_s)
    found = plant.triage()
    assert found.bottleneck == bottleneck
    assert [finding.knob for finding in found.findings] == [keys]  # the other one waits already
    assert found.modelled_s == pytest.approx(plant.iteration_s(), rel=0.02)
    changes: dict[str, Any] = {"engines": 4} if keys == "engine.num" else {"train_s": train_s / 2}
    assert found.findings[0].gain_s == pytest.approx(turned(plant, **changes), rel=0.05)


def test_bound_by_weight_sync_or_by_evaluations() -> None:
    found = Plant(sync_s=50.0).triage()
    assert found.bottleneck == "sync"
    assert knob(found, "sync.type").gain_s == pytest.approx(25.0)
    found = Plant(evaluate_s=50.0).triage()
    assert found.bottleneck == "evaluate"
    assert found.findings[0].knob == "eval.every"
    assert found.findings[0].gain_s == pytest.approx(25.0)


def test_the_model_of_a_run_takes_as_long_as_the_run() -> None:
    for plant in (Plant(), Plant(score_s=1.0), Plant(parse_s=0.6), Plant(gap_s=0.3, workers=3, engines=5)):
        assert plant.triage().modelled_s == pytest.approx(plant.iteration_s(), rel=0.02)


def test_a_run_that_goes_on_is_judged_by_what_is_complete() -> None:
    plant = Plant(score_s=1.0)
    whole = plant.triage()
    spans = plant.spans(iterations=5)
    cut = next(span.start_s for span in spans if span.iteration == 5) + 20.0
    going = triage([span for span in spans if span.end_s <= cut], plant.setup())
    assert going.iterations == whole.iterations
    assert [use.busy_s for use in going.uses] == pytest.approx([use.busy_s for use in whole.uses])
    assert [use.utilisation for use in going.uses] == pytest.approx([use.utilisation for use in whole.uses])
    assert all(use.utilisation <= 1.0 for use in going.uses)


def test_a_run_without_a_whole_iteration_is_refused() -> None:
    plant = Plant()
    with pytest.raises(ConfigError, match="no whole iteration"):
        triage([span for span in plant.spans() if span.name != "iteration"], plant.setup())


def test_the_command_says_it_in_words_and_as_json(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    write_recipe(tmp_path, "rollout.num_groups=8", "rollout.group_size=8").rename(run / "recipe.toml")
    log = EventLog(run / "events" / FILE, flush_s=3600)
    taken = Spans(log)
    for span in Plant(score_s=1.0).spans():
        named = {name: getattr(span, name) for name in ("rollout", "group", "index", "iteration")}
        said = {**{name: value for name, value in named.items() if value is not None}, **span.more}
        if said.get("reward") == "ocr":
            said["reward"] = "jpeg_size"
        lane = span.lane and span.lane.replace("ocr", "jpeg_size")
        taken.add(span.name, start_s=span.start_s, end_s=span.end_s, lane=lane, **said)
    log.close()
    assert len(read_spans(run)) == len(Plant().spans())
    assert here(monkeypatch, "triage", run) == 0
    words = capsys.readouterr().out
    assert (
        "The run is bound by its rollouts, and these by reward/jpeg_size: 1 jpeg_size worker would need 64 s" in words
    )
    assert "1. rewards.0.workers: 1 -> " in words
    assert here(monkeypatch, "triage", run, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bottleneck"] == "reward/jpeg_size"
    assert report["findings"][0]["knob"] == "rewards.0.workers"
    (run / "events" / FILE).unlink()
    assert here(monkeypatch, "triage", run) == 2
