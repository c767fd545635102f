"""What a run's time went into, and which knob of its recipe would make it shorter: a pure function of its spans.

Gains are predicted by the simulation of `verst plan --simulate`, fed with what the stages of this run took: once as the run
was, once with the knob turned. A larger microgroup is taken to need as much work for a sample as before, and twice the
trainer's ranks half the time.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from verst.errors import ConfigError
from verst.obs.measured import Piece, counted, covered_by_lane, mean, measure, pieces
from verst.obs.simulation import RewardStage, Run, Stages, simulate
from verst.obs.spans import ENGINE, PARSER, TRAINER, Span
from verst.obs.stage_times import is_work

WORTH = 0.04
"""What saves less than this share of an iteration is not named, and a number is doubled again only where it saves more."""
PHASES = ("wait", "advantages", "train", "drain", "sync", "evaluate", "checkpoint")
"""Of an iteration, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the recipe says."""

    run: Run
    engines: int
    parsers: int
    rewards: Mapping[str, RewardStage]
    """In the recipe's order; their times are not read."""
    trainer_ranks: int = 1
    may_overlap: bool = True
    """Engines can sample while the trainer trains."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """How busy a kind of worker was."""

    name: str
    """`engine`, `parser`, `reward/<name>` or `trainer`."""
    number: int
    busy_s: float
    """Its work for one rollout over its number: in less time it could not have been done."""
    utilisation: float
    """Share of the iterations' time in which it was at work, mean over its number."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    knob: str
    """Key of the recipe."""
    change: str
    """e.g. `2 -> 4`"""
    why: str
    gain_s: float
    """Seconds of an iteration that it would save."""
    gain: float
    """The same as a share of an iteration now."""
    needs_devices: bool = False
    """Another engine or trainer rank, with what that runs on."""


@dataclass(frozen=True, kw_only=True)
class Triage:
    iterations: int
    """That were looked at; the first of several is not, since it bears what happens once."""
    iteration_s: float
    """Mean."""
    modelled_s: float
    """What the simulation makes of it, evaluation, checkpoint and the driver's own work left out."""
    rollout_s: float
    """From the first request to the last score, mean."""
    phases: Mapping[str, float]
    """Phase of the driver, or `other` -> seconds of an iteration, mean."""
    uses: tuple[Use, ...]
    path: Mapping[str, float]
    """What the last microgroup of a rollout spent its time with, mean over rollouts."""
    bottleneck: str
    """Name of a use, or of a phase."""
    findings: tuple[Finding, ...]
    """What needs no further device first; then by what it saves."""


def triage(spans: Sequence[Span], setup: Setup) -> Triage:
    """Raises ConfigError for spans without a whole iteration."""
    whole = [span for span in spans if span.name == "iteration" and span.error is None]
    if not whole:
        raise ConfigError("there is no whole iteration among the spans of this run: wait for the end of its first one")
    iterations = [span for span in whole if span.iteration != min(s.iteration or 0 for s in whole)] or whole
    iteration_s = mean(span.seconds for span in iterations)
    model = _Model(spans, setup)
    phases = _phases(spans, iterations)
    uses = _uses(spans, iterations, setup, train_s=phases["train"])
    found = [*model.findings(), *_of_phases(phases)]
    findings = [dataclasses.replace(f, gain=f.gain_s / iteration_s) for f in found if f.gain_s >= WORTH * iteration_s]
    return Triage(
        iterations=len(iterations),
        iteration_s=iteration_s,
        modelled_s=model.step_s,
        rollout_s=mean(span.seconds for span in _rollouts(spans)),
        phases=phases,
        uses=uses,
        path=_last_microgroups(spans),
        bottleneck=_bottleneck(uses, phases, side_by_side=setup.run.staleness > 0),
        findings=tuple(sorted(findings, key=lambda f: (f.needs_devices, -f.gain_s))),
    )


def _phases(spans: Sequence[Span], iterations: Sequence[Span]) -> dict[str, float]:
    numbers = {span.iteration for span in iterations}
    inside = [s for s in spans if s.iteration in numbers and s.name in PHASES]
    # Weights of the moving average are handed over inside an evaluation.
    evaluations = [s for s in inside if s.name == "evaluate"]
    inside = [
        s for s in inside if s.name == "evaluate" or not any(e.start_s <= s.start_s < e.end_s for e in evaluations)
    ]
    phases = {name: sum(s.seconds for s in inside if s.name == name) / len(iterations) for name in PHASES}
    return {**phases, "other": max(0.0, mean(s.seconds for s in iterations) - sum(phases.values()))}


def _uses(spans: Sequence[Span], iterations: Sequence[Span], setup: Setup, *, train_s: float) -> tuple[Use, ...]:
    numbers = {ENGINE: setup.engines, PARSER: setup.parsers}
    numbers |= {f"reward/{name}": stage.workers for name, stage in setup.rewards.items()} | {TRAINER: 1}
    windows = sorted((span.start_s, span.end_s) for span in iterations)
    elapsed_s = sum(end - start for start, end in windows)
    complete = {span.rollout for span in _rollouts(spans)}
    by_kind: dict[str, list[Span]] = {kind: [] for kind in numbers}
    for span in spans:
        if span.kind in by_kind and is_work(span.name, span.more):
            by_kind[span.kind].append(span)
    uses = []
    for kind, number in numbers.items():
        inside_s = covered_by_lane(_within(by_kind[kind], windows))
        rollouts_s = covered_by_lane(pieces(span for span in by_kind[kind] if span.rollout in complete))
        busy_s = train_s if kind == TRAINER else rollouts_s / max(1, len(complete)) / number
        uses.append(Use(name=kind, number=number, busy_s=busy_s, utilisation=inside_s / elapsed_s / number))
    return tuple(uses)


def _within(work: Iterable[Span], windows: Sequence[tuple[float, float]]) -> Iterator[Piece]:
    """The parts of spans that lie in one of the windows, which are sorted and do not overlap."""
    starts = [start for start, _ in windows]
    for lane, start_s, end_s in pieces(work):
        for number in range(max(0, bisect_right(starts, start_s) - 1), len(windows)):
            low, high = windows[number]
            if low >= end_s:
                break
            if max(start_s, low) < min(end_s, high):
                yield lane, max(start_s, low), min(end_s, high)


def _rollouts(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.name == "rollout" and span.error is None]


def _last_microgroups(spans: Sequence[Span]) -> dict[str, float]:
    """Of each rollout the microgroup that was scored last: what it spent its time with."""
    last: dict[int, Span] = {}
    for span in spans:
        if span.name == "reward" and span.error is None and span.rollout is not None and span.rollout >= 0:
            last[span.rollout] = max(span, last.get(span.rollout, span), key=lambda s: s.end_s)
    chosen = {span.microgroup for span in last.values()}
    total: dict[str, float] = defaultdict(float)
    waits: dict[tuple[int, int, int], Span] = {}
    for span in spans:
        if span.microgroup not in chosen or span.microgroup is None:
            continue
        if span.name in ("engine_wait", "queue"):
            total["waiting for an engine"] += span.seconds
        elif span.name in ("request", "transfer", "parse"):
            total[{"request": "engine", "parse": "parser"}.get(span.name, span.name)] += span.seconds
        elif span.name == "parse_wait":
            total["waiting for a parser"] += span.seconds
        elif span.name == "reward_wait":
            waits[span.microgroup] = max(span, waits.get(span.microgroup, span), key=lambda s: s.end_s)
    total["engine"] -= sum(s.seconds for s in spans if s.name == "queue" and s.microgroup in chosen)
    for reward in last.values():
        assert reward.microgroup is not None
        wait = waits.get(reward.microgroup)
        if wait is not None:
            total[f"waiting for reward {wait.more['reward']}"] += wait.seconds
        total["rewards"] += reward.seconds - (0.0 if wait is None else wait.seconds)
    return {name: seconds / len(last) for name, seconds in total.items()}


def _bottleneck(uses: Sequence[Use], phases: Mapping[str, float], *, side_by_side: bool) -> str:
    """The longest phase; of a rollout the stage that needs longest by itself, which goes on beside the others where the
    schedule is asynchronous."""
    stage = max((use for use in uses if use.name != TRAINER), key=lambda use: use.busy_s)
    rollout_s = max(phases["wait"] + phases["drain"], stage.busy_s if side_by_side else 0.0)
    others = {name: seconds for name, seconds in phases.items() if name not in ("wait", "drain")}
    longest = max(others, key=lambda name: others[name])
    if others[longest] > rollout_s:
        return TRAINER if longest == "train" else longest
    return stage.name


class _Model:
    """The run as the simulation has it, and with a knob turned."""

    def __init__(self, spans: Sequence[Span], setup: Setup) -> None:
        self._setup = setup
        judged = [s.more.get("dropped_by") is None for s in spans if s.name == "filter"]
        self._run = dataclasses.replace(setup.run, pass_rate=max(sum(judged), 1) / len(judged) if judged else 1.0)
        self._num_microgroups = setup.run.num_groups * setup.run.group_size // setup.run.microgroup_size
        measured = measure(spans)
        looked_at, _ = counted(spans)
        requests = [s for s in looked_at if s.name == "request"]
        work_s = covered_by_lane(pieces(s for s in looked_at if s.kind == ENGINE and is_work(s.name, s.more)))
        self._gap_s = max(0.0, covered_by_lane(pieces(requests)) - work_s) / len(requests)
        """That an engine has a request and does nothing for it that it tells of, for each request."""
        waits = [s.seconds for s in looked_at if s.name == "parse_wait"]
        self._stages = Stages(
            engines=setup.engines,
            generate_s=(measured.generate_s + self._gap_s,),
            # The shortest wait for a parser is the way to it and back.
            transfer_s=measured.transfer_s + min(waits, default=0.0),
            parsers=setup.parsers,
            parse_s=(measured.parse_s,),
            rewards={
                name: dataclasses.replace(stage, **dataclasses.asdict(measured.rewards[name]))
                for name, stage in setup.rewards.items()
                if name in measured.rewards
            },
            train_s=measured.train_s,
            sync_s=measured.sync_s,
        )
        self.step_s = simulate(self._run, self._stages).step_s

    def findings(self) -> Iterator[Finding]:
        setup, stages = self._setup, self._stages
        for number, name in enumerate(setup.rewards):
            if name in stages.rewards:
                yield from self._more(
                    f"rewards.{number}.workers",
                    setup.rewards[name].workers,
                    lambda n, name=name: self._with_workers(name, n),  # type: ignore[misc]
                    why=f"samples wait for reward {name} while engines are idle",
                )
        yield from self._more(
            "rollout.parsers.num",
            setup.parsers,
            lambda n: dataclasses.replace(stages, parsers=n),
            why="answers wait to be decoded",
        )
        yield from self._more(
            "engine.num",
            setup.engines,
            lambda n: dataclasses.replace(stages, engines=n),
            why="engines are what a rollout waits for",
            needs_devices=True,
        )
        yield from self._more(
            "trainer.ranks",
            setup.trainer_ranks,
            lambda n: dataclasses.replace(stages, train_s=stages.train_s * setup.trainer_ranks / n),
            why="training takes much of an iteration; a larger trainer.tile_size, where memory allows it "
            "(verst plan --memory), goes the same way",
            needs_devices=True,
        )
        if not self._run.staleness and setup.may_overlap:
            ahead = dataclasses.replace(self._run, staleness=1)
            yield Finding(
                knob="schedule.type",
                change="sync -> async",
                why="engines and trainer wait for each other in turns; at most this much if they do not share a device "
                "(docs/schedules.md)",
                gain_s=self.step_s - simulate(ahead, stages, iterations=4).step_s,
                gain=0.0,
            )
        yield from self._microgroups()

    def _with_workers(self, name: str, number: int) -> Stages:
        rewards = dict(self._stages.rewards)
        rewards[name] = dataclasses.replace(rewards[name], workers=number)
        return dataclasses.replace(self._stages, rewards=rewards)

    def _more(
        self, knob: str, now: int, stages_of: Callable[[int], Stages], *, why: str, needs_devices: bool = False
    ) -> Iterator[Finding]:
        """Twice as many, and again as long as it helps; of what needs devices only twice."""
        best, best_s = now, self.step_s
        while best < (2 * now if needs_devices else self._num_microgroups * self._run.microgroup_size):
            step_s = simulate(self._run, stages_of(2 * best)).step_s
            if best_s - step_s < WORTH * self.step_s:
                break
            best, best_s = 2 * best, step_s
        if best > now:
            change, gain_s = f"{now} -> {best}", self.step_s - best_s
            yield Finding(knob=knob, change=change, why=why, gain_s=gain_s, gain=0.0, needs_devices=needs_devices)

    def _microgroups(self) -> Iterator[Finding]:
        """Larger ones where an engine's time goes into what comes with every request, smaller ones where few are left at
        the end."""
        run, now = self._run, self._run.microgroup_size
        best, best_s = now, self.step_s
        larger = [now * 2**i for i in range(1, 7) if run.group_size % (now * 2**i) == 0]
        smaller = [now // 2**i for i in range(1, 7) if now % 2**i == 0]
        for sizes in (larger, smaller):
            for size in sizes:
                step_s = self._of_size(size)
                if best_s - step_s < WORTH * self.step_s:
                    break
                best, best_s = size, step_s
        if best == now:
            return
        share = self._gap_s / self._stages.generate_s[0]
        why = (
            f"{share:.0%} of the engines' time goes into what comes with every request, whatever its size"
            if best > now
            else "the last microgroups of a rollout keep some engines or workers busy alone"
        )
        yield Finding(
            knob="rollout.microgroup_size",
            change=f"{now} -> {best}",
            why=f"{why}; trainer.tile_size goes with it where the ratio shall be exactly 1",
            gain_s=self.step_s - best_s,
            gain=0.0,
        )

    def _of_size(self, size: int) -> float:
        """Seconds of an iteration with microgroups of this size."""
        stages, ratio = self._stages, size / self._run.microgroup_size
        changed = dataclasses.replace(
            stages,
            generate_s=((stages.generate_s[0] - self._gap_s) * ratio + self._gap_s,),
            transfer_s=stages.transfer_s * ratio,
            parse_s=(stages.parse_s[0] * ratio,),
        )
        return simulate(dataclasses.replace(self._run, microgroup_size=size), changed).step_s


def _of_phases(phases: Mapping[str, float]) -> Iterator[Finding]:
    """What an iteration spends outside rollout and training."""
    yield Finding(
        knob="sync.type",
        change="a faster one",
        why=f"weights travel for {phases['sync']:.3g} s of an iteration; a transport for where the processes are, or LoRA "
        "pairs in place of all weights (docs/sync.md), would do it in half the time or less",
        gain_s=phases["sync"] / 2,
        gain=0.0,
    )
    yield Finding(
        knob="eval.every",
        change="doubled",
        why=f"evaluations take {phases['evaluate']:.3g} s of an iteration on average",
        gain_s=phases["evaluate"] / 2,
        gain=0.0,
    )
    yield Finding(
        knob="checkpoint.every",
        change="doubled",
        why=f"checkpoints take {phases['checkpoint']:.3g} s of an iteration on average; checkpoint.async_save hides nearly "
        "all of it",
        gain_s=phases["checkpoint"] / 2,
        gain=0.0,
    )
