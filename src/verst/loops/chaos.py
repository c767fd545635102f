"""A run among faults: its processes are killed, paused, hung and slowed down at random, from a seed.

    calm run ──────────────────────────────────────────> its folder ┐
    run ─ fault ─ fault ─ (driver gone: same command) ─> its folder ┴─> what must hold of both

Only processes that the run itself names in processes.json, and that descend from the driver started here, are touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from verst.config.recipe import RlRecipe
from verst.errors import ConfigError
from verst.loops.ledger import ledger_faults, read_ledger
from verst.loops.replay import compare_metrics, compare_tensors
from verst.obs.events import read_events
from verst.obs.metrics import read_metrics
from verst.trainer import checkpoint

Kind = Literal["engine", "trainer", "parser", "reward", "driver", "router"]
Action = Literal["kill", "pause", "hang", "delay"]
KINDS: tuple[Kind, ...] = ("engine", "trainer", "parser", "reward", "driver", "router")
ACTIONS: tuple[Action, ...] = ("kill", "pause", "hang", "delay")
_WEIGHTS: dict[Action, int] = {"kill": 5, "pause": 2, "hang": 1, "delay": 2}
"""How often each is drawn, where it is possible."""
_UNHURRIED = 3
"""Faults between two new iterations at most: a run that is hit again and again in its restart shows nothing else."""


def kinds_of(recipe: RlRecipe) -> tuple[Kind, ...]:
    """Those that a run of the recipe has."""
    return tuple(kind for kind in KINDS if kind != "router" or recipe.engine.router.enabled)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A fault of the schedule."""

    kind: Kind
    action: Action
    wait_s: float
    """After the one before, while the run is up."""
    seconds: float
    """Of a pause, or of being slow."""
    choice: float
    """In [0, 1): which of the processes of that kind."""


@dataclass(kw_only=True)
class Outcome:
    """What came of it."""

    planned: int
    injected: list[dict[str, Any]] = field(default_factory=list)
    """kind, action, pid, iteration (the last that had ended), seconds since the start."""
    driver_starts: int = 1
    restarts: dict[str, int] = field(default_factory=dict)
    """kind -> how often the run brought one back."""
    hangs: int = 0
    cut_short: str | None = None
    """Why there were fewer faults than planned."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """One line for each thing that does not hold."""
    iterations: int = 0
    samples: int = 0
    """Trained or dropped by a filter, each once."""
    metrics: int = 0
    tensors: int = 0
    """Compared with the calm run's."""


def schedule(
    seed: int, faults: int, kinds: Sequence[Kind], *, hangs: Sequence[Kind], longest_wait_s: float
) -> list[Planned]:
    """The same for the same arguments. hangs: kinds in which a hang can be found."""
    rng = random.Random(seed)
    planned = []
    for _ in range(faults):
        kind = rng.choice(list(kinds))
        possible = [action for action in ACTIONS if action != "hang" or kind in hangs]
        (action,) = rng.choices(possible, [_WEIGHTS[action] for action in possible])
        planned.append(
            Planned(
                kind=kind,
                action=action,
                wait_s=rng.uniform(0.0, longest_wait_s),
                seconds=rng.uniform(0.2, 2.0),
                choice=rng.random(),
            )
        )
    return planned


class Storm:
    """One run of a command, hit by a schedule."""

    def __init__(
        self,
        command: Sequence[str],
        run: Path,
        planned: Sequence[Planned],
        *,
        log: Path,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        """run: its folder; log: where its output goes. timeout_s: after which no fault is begun, and again for the rest."""
        self._command, self._run, self._planned = list(command), run, list(planned)
        self._log, self._say = log, say
        self._started = time.monotonic()
        self._timeout_s = timeout_s
        self._deadline = self._started + timeout_s
        self._best = 0
        self._since_best = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._hit: list[psutil.Process] = []
        """Processes that are killed, or stopped for good: it is for the run to find them."""

    def rage(self) -> Outcome:
        """Until the run has ended by itself, every fault tried, or as many as there was time for."""
        outcome = Outcome(planned=len(self._planned))
        self._start()
        try:
            for number, fault in enumerate(self._planned, start=1):
                if not self._strike(fault, number, outcome):
                    break
            self._finish(outcome)
        finally:
            self._end_all()
        outcome.seconds = time.monotonic() - self._started
        return outcome

    def _start(self) -> None:
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def _strike(self, fault: Planned, number: int, outcome: Outcome) -> bool:
        """Whether it goes on."""
        if time.monotonic() > self._deadline:
            return self._cut(outcome, "the time was up")
        if self._since_best >= _UNHURRIED and not self._wait(lambda: self._progressed() or self._ended()):
            return self._cut(outcome, "no iteration ended any more before the time was up")
        if not self._wait(lambda: self._is_up() or self._ended()):
            return self._cut(outcome, "the time was up before the run was")
        time.sleep(fault.wait_s)
        if not self._wait(lambda: bool(self._targets(fault.kind)) or self._ended()):
            return self._cut(outcome, f"the time was up before the {fault.kind} was there again")
        target = self._targets(fault.kind)
        if not target:
            return self._cut(outcome, f"the run ended after {number - 1} faults: give it more run.iterations")
        process = target[int(fault.choice * len(target))]
        self._progressed()
        self._do(fault, process)
        self._since_best += 1
        hit = {"kind": fault.kind, "action": fault.action, "pid": process.pid, "iteration": self._best}
        outcome.injected.append(hit | {"seconds": round(time.monotonic() - self._started, 2)})
        self._say(f"{number}/{outcome.planned}: {fault.action} {fault.kind} {process.pid} after iteration {self._best}")
        if fault.kind == "driver" and fault.action == "kill":
            self._again(outcome)
        return True

    def _do(self, fault: Planned, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if fault.action in ("kill", "hang"):
                self._hit.append(process)
            if fault.action == "kill":
                process.kill()
                return
            process.suspend()
            if fault.action == "hang":
                return
            if fault.action == "pause":
                time.sleep(fault.seconds)
                process.resume()
                return
            end = time.monotonic() + 2 * fault.seconds
            while time.monotonic() < end:
                time.sleep(0.05)
                process.resume()
                time.sleep(0.02)
                process.suspend()
            process.resume()

    def _again(self, outcome: Outcome) -> None:
        """The driver is gone: nothing of it stays, and the same command goes on."""
        assert self._process is not None
        self._process.wait(timeout=60)
        outcome.driver_starts += 1
        self._start()

    def _finish(self, outcome: Outcome) -> None:
        self._deadline = time.monotonic() + self._timeout_s
        if not self._wait(self._ended):
            outcome.problems.append(f"the run did not end within {self._timeout_s:g} s after the last fault")
            return
        assert self._process is not None
        if self._process.returncode != 0:
            tail = self._log.read_text(errors="replace").splitlines()[-12:]
            outcome.problems.append(f"the run ended with status {self._process.returncode}: " + " | ".join(tail))

    def _cut(self, outcome: Outcome, why: str) -> bool:
        outcome.cut_short = why
        return False

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _progressed(self) -> bool:
        rows = read_metrics(self._run / "metrics.jsonl")
        last = max((int(row["iteration"]) for row in rows), default=0)
        if last <= self._best:
            return False
        self._best, self._since_best = last, 0
        return True

    def _pids(self) -> dict[str, list[int]]:
        """As the run says; none before the driver started here has written them."""
        path = self._run / "processes.json"
        pids: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}
        return pids if self._process is not None and pids.get("driver") == [self._process.pid] else {}

    def _is_up(self) -> bool:
        return bool(self._pids())

    def _targets(self, kind: Kind) -> list[psutil.Process]:
        """Living processes of that kind which descend from the driver started here."""
        assert self._process is not None
        named = {pid for role, pids in self._pids().items() if role.split(":")[0] == kind for pid in pids}
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self._process.pid)
            family = [process for process in (driver, *driver.children(recursive=True)) if process.pid in named]
            return [process for process in family if process not in self._hit and _lives(process)]
        return []

    def _wait(self, condition: Callable[[], bool]) -> bool:
        while not condition():
            if time.monotonic() > self._deadline:
                return False
            time.sleep(0.05)
        return True

    def _end_all(self) -> None:
        """What was started here ends with us, whatever went wrong."""
        if self._process is None or self._process.poll() is not None:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def chaos(
    recipe: RlRecipe,
    source: Path,
    overrides: Sequence[str],
    *,
    out: Path,
    seed: int,
    faults: int,
    kinds: Sequence[Kind],
    limit_s: float,
    timeout_s: float,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """The calm run and the disturbed one, both in `out`, and what must hold. source: the recipe's file.

    limit_s: after which an engine, a parser or the router hangs; the trainer's is three times that, and that of a start four
    times. Raises ConfigError where the calm run does not end.
    """
    if (out / "stormy").exists():
        raise ConfigError(f"{out} holds a disturbed run already: give --out another folder, or remove {out / 'stormy'}")
    out.mkdir(parents=True, exist_ok=True)
    limits = {f"{kind}_s": limit_s for kind in ("engine", "parser", "router")}
    limits |= {"trainer_s": 3 * limit_s, "start_s": 4 * limit_s, "poll_s": min(1.0, limit_s / 4)}
    limits["restarts"] = faults + 1
    tables = [f"supervision.{name}={value}" for name, value in limits.items()]

    def command(name: str) -> list[str]:
        changed = [*overrides, *tables, f"run.folder={out / name}"]
        return [sys.executable, "-m", "verst.cli.main", "train", str(source), *changed]

    calm, stormy = (out / name / recipe.run.name for name in ("calm", "stormy"))
    say("the calm run")
    started = time.monotonic()
    done = subprocess.run(command("calm"), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"the run does not come to its end by itself: {(done.stdout + done.stderr)[-2000:]}")
    rows = read_metrics(calm / "metrics.jsonl")
    each = sum(row["perf/iteration_s"] for row in rows[1:]) / max(1, len(rows) - 1)
    say(f"{len(rows) - 1} iterations in {time.monotonic() - started:.0f} s, {each:.2f} s each")
    hangs: list[Kind] = [kind for kind in ("engine", "trainer", "parser", "router") if kind in kinds]
    if "reward" in kinds and all(r.timeout_s * max(1, r.attempts - 1) <= 3 * limit_s for r in recipe.judges):
        hangs.append("reward")
    planned = schedule(seed, faults, kinds, hangs=hangs, longest_wait_s=2 * each)
    storm = Storm(command("stormy"), stormy, planned, log=out / "stormy.log", timeout_s=timeout_s, say=say)
    outcome = storm.rage()
    outcome.problems += invariants(recipe, calm, stormy, outcome)
    return outcome


def invariants(recipe: RlRecipe, calm: Path, stormy: Path, outcome: Outcome) -> Iterator[str]:
    """What does not hold, a line each; counts what was compared into `outcome`."""
    rollout = recipe.rollout
    ledger = read_ledger(stormy / "trained.jsonl")
    yield from ledger_faults(
        ledger,
        iterations=recipe.run.iterations,
        groups=0 if rollout.dynamic.enabled else rollout.num_groups,
        group_size=rollout.group_size,
        staleness=recipe.schedule.staleness + rollout.dynamic.staleness,
    )
    outcome.iterations = len(ledger)
    outcome.samples = sum(len(group["indices"]) for row in ledger for group in row["groups"])
    _count_events(stormy / "events" / "supervision.jsonl", outcome)
    rows = {int(row["iteration"]): row for row in read_metrics(stormy / "metrics.jsonl")}
    expected = {int(row["iteration"]): row for row in read_metrics(calm / "metrics.jsonl")}
    if rows.keys() != expected.keys():
        yield f"metrics of iterations {sorted(rows)}, of the calm run {sorted(expected)}"
    if not recipe.run.deterministic:
        return
    if ledger != read_ledger(calm / "trained.jsonl"):
        yield "it was trained on other samples, or other rewards, than the calm run"
    for number in sorted(rows.keys() & expected.keys()):
        found, count = compare_metrics(number, expected[number], rows[number])
        outcome.metrics += count
        yield from found
    newest = [checkpoint.published(run / "checkpoints")[-1:] for run in (calm, stormy)]
    if not all(newest) or newest[0][0].name != newest[1][0].name:
        yield f"the newest checkpoints are {newest}"
        return
    found, outcome.tensors = compare_tensors(newest[0][0], newest[1][0])
    yield from found


def _count_events(path: Path, outcome: Outcome) -> None:
    events = read_events(path)
    outcome.restarts = dict(Counter(e["process"].split(" ")[0] for e in events if e["name"] == "restart"))
    outcome.hangs = sum(e["name"] == "hang" for e in events)
