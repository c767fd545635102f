"""A run's timing without the run: a discrete-event simulation of rollout, trainer and weight sync.

    groups ─> engines ─> transfer ─> parsers ─> reward workers ─> group complete ─> trainer ─> sync ─> engines

The rules are those of the run: microgroups queue for engines in the order of their groups, every stage begins what is
there, reward calls fill up as in `rewards.pool`, failed samples go again, and iteration i trains on rollout i - 1 while
rollouts up to i - 1 + staleness are made (`loops.rl`). What is drawn at random follows from `seed`: the same input gives
the same result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from verst.obs.simulation_parts import Clock, Places, RewardQueue, RewardStage

__all__ = ["RewardStage", "Run", "Simulated", "StageUse", "Stages", "simulate"]

Seconds = Sequence[float]
"""Measured durations, one of which is drawn each time; a single one is always that."""
_TURNS_BELOW = 0.8
"""Share of an iteration that a stage must be busy to be what bounds it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is to be done."""

    num_groups: int
    group_size: int
    microgroup_size: int
    staleness: int = 0
    """Rollouts that are begun ahead; 0: trainer and engines take turns."""
    dynamic: bool = False
    """Groups that do not pass the filters are replaced, as by `rollout.dynamic` without extra ones."""
    pass_rate: float = 1.0
    """Share of groups that pass; only read where it is dynamic."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How many there are of what, and how long each takes."""

    engines: int
    generate_s: Seconds
    """Of one microgroup on one engine."""
    transfer_s: float = 0.0
    """From the engine's end until a parser may begin; any number travel at a time."""
    parsers: int = 1
    parse_s: Seconds = (0.0,)
    """Of one microgroup."""
    rewards: Mapping[str, RewardStage] = field(default_factory=dict)
    train_s: float = 0.0
    """Of one rollout, by all trainer ranks together."""
    sync_s: float = 0.0
    """Of one weight hand-off, in which engines make nothing."""


@dataclass(frozen=True, kw_only=True)
class StageUse:
    name: str
    places: int
    """Engines, parsers, workers; the trainer is one, whatever its ranks."""
    bound_s: float
    """Busy seconds of one iteration over places: it cannot take less."""
    utilisation: float
    """Busy share of its places."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Means over iterations."""

    step_s: float
    """From the end of one iteration to the end of the next."""
    rollout_s: float
    """From the first request to the last score."""
    samples_per_s: float
    """That are trained on."""
    wait_for_rollout_s: float
    """For which the trainer waited for a rollout."""
    stages: tuple[StageUse, ...]

    @property
    def longest(self) -> StageUse:
        """The stage of the rollout that takes longest."""
        return max((use for use in self.stages if use.name not in ("trainer", "sync")), key=lambda use: use.bound_s)

    @property
    def overlap(self) -> float:
        """Longest stage / rollout time; 1 is perfect."""
        return self.longest.bound_s / self.rollout_s if self.rollout_s else 1.0

    @property
    def bottleneck(self) -> str:
        """The busiest stage; where it is idle for much of an iteration, it and its others take turns."""
        busiest = max(self.stages, key=lambda use: use.bound_s)
        return busiest.name if busiest.bound_s >= _TURNS_BELOW * self.step_s else f"turns ({busiest.name})"


def simulate(run: Run, stages: Stages, *, iterations: int = 2, seed: int = 0) -> Simulated:
    """iterations: that are counted, besides those in which an asynchronous run gets going."""
    simulation = _Simulation(run, stages, seed)
    warm = run.staleness + 1 if run.staleness else 0
    marks = simulation.iterate(warm + iterations)
    first, last = marks[warm], marks[-1]
    elapsed = last.now - first.now
    places = simulation.places
    return Simulated(
        step_s=elapsed / iterations,
        rollout_s=(last.rollouts_s - first.rollouts_s) / iterations,
        samples_per_s=run.num_groups * run.group_size * iterations / elapsed if elapsed else 0.0,
        wait_for_rollout_s=(last.waited_s - first.waited_s) / iterations,
        stages=tuple(
            StageUse(
                name=name,
                places=places[name].number,
                bound_s=(last.busy_s[name] - first.busy_s[name]) / places[name].number / iterations,
                utilisation=(last.busy_s[name] - first.busy_s[name]) / places[name].number / elapsed
                if elapsed
                else 0.0,
            )
            for name in places
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """How things stood when an iteration ended."""

    now: float
    rollouts_s: float
    """Sum over those that were taken."""
    waited_s: float
    busy_s: Mapping[str, float]


class _Simulation:
    def __init__(self, run: Run, stages: Stages, seed: int) -> None:
        self.run = run
        self.rng = random.Random(seed)
        self.clock = Clock()
        self._stages = stages
        rewards = {name: RewardQueue(self.clock, stage, self.rng) for name, stage in stages.rewards.items()}
        self._of_samples = [rewards[name] for name, stage in stages.rewards.items() if not stage.of_group]
        self._of_groups = [rewards[name] for name, stage in stages.rewards.items() if stage.of_group]
        self.places = {
            "engine": Places(self.clock, stages.engines),
            "parser": Places(self.clock, stages.parsers),
            **{f"reward {name}": queue.workers for name, queue in rewards.items()},
            "trainer": Places(self.clock, 1),
            "sync": Places(self.clock, 1),
        }
        self._rollouts: dict[int, _Rollout] = {}
        self._begun, self._through = 0, -1
        """Rollouts that were begun, and the last that may be."""
        self._rollouts_s = self._waited_s = 0.0
        self._loop: Iterator[None] = iter(())

    def iterate(self, count: int) -> list[_Mark]:
        """The start, and the end of each iteration."""
        marks = [self._mark()]
        self._loop = self._iterations(count, marks)
        self.go_on()
        while len(marks) <= count:
            self.clock.step()
        return marks

    def go_on(self) -> None:
        """Something has happened that may have been waited for."""
        last = self._rollouts.get(self._begun - 1)
        while self._begun <= self._through and not (self.run.dynamic and last is not None and last.ended is None):
            last = self._rollouts[self._begun] = _Rollout(self)
            self._begun += 1
            last.begin()
        next(self._loop, None)

    def _iterations(self, count: int, marks: list[_Mark]) -> Iterator[None]:
        """`loops.rl`; what it waits for it looks at whenever `go_on` is called."""
        for iteration in range(count):
            self._through = iteration + self.run.staleness
            self.clock.after(0.0, self.go_on)
            asked = self.clock.now
            while (taken := self._rollouts.get(iteration)) is None or taken.ended is None:
                yield
            self._waited_s += self.clock.now - asked
            self._rollouts_s += taken.ended - taken.begun
            yield from self._busy("trainer", self._stages.train_s)
            while not all(rollout.is_generated for rollout in self._rollouts.values()):
                yield
            yield from self._busy("sync", self._stages.sync_s)
            # Not before: in a dynamic run the next one waits for its end.
            del self._rollouts[iteration]
            marks.append(self._mark())

    def _busy(self, name: str, seconds: float) -> Iterator[None]:
        done = False

        def ended() -> None:
            nonlocal done
            done = True
            self.go_on()

        self.places[name].do(seconds, ended)
        while not done:
            yield

    def _mark(self) -> _Mark:
        return _Mark(
            now=self.clock.now,
            rollouts_s=self._rollouts_s,
            waited_s=self._waited_s,
            busy_s={name: places.busy_s for name, places in self.places.items()},
        )

    def microgroup(self, generated: Callable[[], None], scored: Callable[[], None]) -> None:
        """One request, from the queue of the engines to its last score."""
        stages, size = self._stages, self.run.microgroup_size

        def arrived() -> None:
            generated()
            self.clock.after(stages.transfer_s, lambda: self.places["parser"].do(self._draw(stages.parse_s), parsed))

        def parsed() -> None:
            self._all_of(self._of_samples, size, scored)

        self.places["engine"].do(self._draw(stages.generate_s), arrived)

    def compare_group(self, then: Callable[[], None]) -> None:
        """What rewards do with a group whose samples are all there."""
        self._all_of(self._of_groups, self.run.group_size, then)

    def _all_of(self, queues: Sequence[RewardQueue], samples: int, then: Callable[[], None]) -> None:
        left = len(queues)

        def ended() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                then()

        for queue in queues:
            queue.score(samples, ended)
        if not queues:
            then()

    def _draw(self, seconds: Seconds) -> float:
        return seconds[0] if len(seconds) == 1 else self.rng.choice(seconds)


class _Rollout:
    """One rollout, from its first group to its last score."""

    def __init__(self, simulation: _Simulation) -> None:
        run = simulation.run
        self._simulation = simulation
        self.begun = simulation.clock.now
        self.ended: float | None = None
        self._missing = run.num_groups
        self._microgroups = run.group_size // run.microgroup_size
        """Of one group."""
        self._to_generate = run.num_groups * self._microgroups

    def begin(self) -> None:
        for _ in range(self._missing):
            self._begin_group()

    @property
    def is_generated(self) -> bool:
        """Engines have nothing more to do for it."""
        return self.ended is not None if self._simulation.run.dynamic else self._to_generate == 0

    def _begin_group(self) -> None:
        left = self._microgroups

        def scored() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._simulation.compare_group(self._group_complete)

        for _ in range(self._microgroups):
            self._simulation.microgroup(self._generated, scored)

    def _generated(self) -> None:
        self._to_generate -= 1
        if self._to_generate == 0:
            self._simulation.go_on()

    def _group_complete(self) -> None:
        simulation = self._simulation
        if simulation.run.dynamic and simulation.rng.random() >= simulation.run.pass_rate:
            self._begin_group()
            return
        self._missing -= 1
        if self._missing == 0:
            self.ended = simulation.clock.now
            simulation.go_on()
