"""One run folder as the page sees it, kept up to date by looking again."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verst.dashboard.groups import GroupStore
from verst.dashboard.spans import SpanStore
from verst.dashboard.tail import Tail
from verst.errors import ConfigError
from verst.obs.metrics import ITERATION
from verst.obs.samples import INDEX, Kind, saved_steps
from verst.obs.stamps import Stamps
from verst.obs.tables import flat

MAX_ROWS = 4000
"""Iterations of one run that a page gets; of a longer run every second, third ... and those with an evaluation."""
KINDS: tuple[Kind, ...] = ("heldout", "rollout")
_SERVED = {".png", ".webp", ".webm", ".json"}
_FACTS = ("run.json", "summary.json")

Facts = dict[str, Any]


@dataclass
class Seen:
    """How much of a run one page has been told."""

    version: int = -1
    metrics: int = 0
    alarms: int = 0
    spans: int = 0
    bands: int = 0
    facts: Facts | None = None
    samples: Facts | None = None

    def restart(self, version: int) -> None:
        vars(self).update(vars(Seen(version=version)))


class RunView:
    def __init__(self, path: Path, *, name: str, number: int) -> None:
        """name and number: unique among the runs of one page."""
        self.path = path.resolve()
        self.name = name
        self.number = number
        self._metrics = Tail(path / "metrics.jsonl")
        self._events = {kind: Tail(path / "events" / f"{kind}.jsonl") for kind in ("alarms", "groups", "spans")}
        self._tails = (self._metrics, *self._events.values())
        self._version = 0
        """Of what was read: another one makes void what a page was told."""
        self._rows: list[dict[str, Any]] = []
        self._alarms: list[dict[str, Any]] = []
        self._banded: list[int] = []
        self._facts: Facts = {}
        self._stamps = Stamps()
        self.samples: Facts = {}
        """kind -> iterations of which there are samples; `sheets`: those with a grid in one picture."""
        self.groups = GroupStore()
        self.spans = SpanStore()

    def refresh(self) -> None:
        """Read what was added since."""
        self._read()
        while any(tail.behind for tail in self._tails):
            self._read()
        if self._stamps.changed(*(self.path / name for name in (*_FACTS, "recipe.toml"))):
            self._facts = self._read_facts()
        self._facts["damaged"] = self.num_damaged
        self.samples = self._read_samples()

    def _read(self) -> None:
        """A piece of each file."""
        rows, void = self._metrics.read()
        if void:
            self._rows = []
        self._rows += [row for row in rows if isinstance(row.get(ITERATION), int)]
        alarms, alarms_void = self._events["alarms"].read()
        groups, groups_void = self._events["groups"].read()
        spans, spans_void = self._events["spans"].read()
        if alarms_void:
            self._alarms = []
        if groups_void:
            self.groups.clear()
            self._banded = []
        if spans_void:
            self.spans.clear()
        self._version += void or alarms_void or groups_void or spans_void
        self._alarms += alarms
        self._banded += sorted(self.groups.add(groups))
        for span in spans:
            self.spans.add(span)

    def news(self, seen: Seen) -> dict[str, Any] | None:
        """What a page has not been told yet; None where that is nothing. `seen` is moved on."""
        message: dict[str, Any] = {}
        if seen.version != self._version:
            seen.restart(self._version)
            message["reset"] = True
        if len(self._rows) > seen.metrics:
            message["metrics"] = thinned(self._rows) if seen.metrics == 0 else self._rows[seen.metrics :]
            seen.metrics = len(self._rows)
        if len(self._alarms) > seen.alarms:
            message["alarms"] = self._alarms[seen.alarms :]
            seen.alarms = len(self._alarms)
        if len(self._banded) > seen.bands:
            iterations = sorted(set(self._banded[seen.bands :]))
            message["bands"] = [self.groups.band(i) for i in every_nth(iterations, MAX_ROWS)]
            seen.bands = len(self._banded)
        if len(self.spans) != seen.spans:
            message["spans"] = seen.spans = len(self.spans)
        if self._facts != seen.facts:
            message["facts"] = seen.facts = dict(self._facts)
        if self.samples != seen.samples:
            message["samples"] = seen.samples = self.samples
        return {"run": self.number, **message} if message else None

    def _read_facts(self) -> Facts:
        """Of the run as a whole; what is not there yet is absent."""
        found: Facts = {"folder": str(self.path), "recipe": {}}
        for name in _FACTS:
            value = _json(self.path / name)
            if value is not None:
                found[name.removesuffix(".json")] = value
        try:
            found["recipe"] = flat(tomllib.loads((self.path / "recipe.toml").read_text(encoding="utf-8")))
        except FileNotFoundError:
            pass
        except ValueError as error:
            found["recipe_error"] = f"recipe.toml cannot be read: {error}"
        return found

    @property
    def num_damaged(self) -> int:
        """Lines of the run's files that cannot be read."""
        return sum(tail.num_damaged for tail in self._tails)

    def _read_samples(self) -> Facts:
        root = self.path / "samples"
        found: Facts = {kind: [_step(path) for path in saved_steps(root, kind)] for kind in KINDS}
        return {**found, "sheets": sorted(_step(path) for path in root.glob("step_*.png"))}

    def shown(self, kind: Kind, iteration: int) -> list[dict[str, Any]]:
        """What `samples.json` says; empty where it is gone by now."""
        index = _json(self.path / "samples" / kind / f"step_{iteration:08d}" / INDEX)
        return [] if index is None else list(index["samples"])

    def file(self, name: str) -> Path | None:
        """A file below samples/; None for what is not there, is no sample, or leads elsewhere."""
        root = self.path / "samples"
        path = (root / name).resolve()
        inside = path.is_relative_to(root.resolve()) and root.resolve().is_relative_to(self.path)
        return path if inside and path.suffix in _SERVED and path.is_file() else None

    def close(self) -> None:
        for tail in self._tails:
            tail.close()


def find_runs(paths: Sequence[Path]) -> list[RunView]:
    """The run folders among `paths`, and those directly in them. Raises ConfigError where there are none."""
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is no folder; give run folders, or a folder of them such as runs/")
        if not _runs_in([path]):
            raise ConfigError(f"{path} is no run folder and has none in it: there is no recipe.toml or metrics.jsonl")
    return new_runs(paths, [])


def new_runs(paths: Sequence[Path], known: Sequence[RunView]) -> list[RunView]:
    """Those that are there and not known yet, with the numbers that come next."""
    there = {view.path for view in known}
    added = [path for path in _runs_in(paths) if path not in there]
    names = _names([*(view.path for view in known), *added])[len(known) :]
    return [
        RunView(path, name=name, number=len(known) + i) for i, (path, name) in enumerate(zip(added, names, strict=True))
    ]


def _runs_in(paths: Sequence[Path]) -> list[Path]:
    found = [
        run
        for path in paths
        for run in ([path] if is_run(path) else sorted(child for child in path.glob("*") if is_run(child)))
    ]
    return list(dict.fromkeys(path.resolve() for path in found))


def is_run(path: Path) -> bool:
    return path.is_dir() and ((path / "recipe.toml").exists() or (path / "metrics.jsonl").exists())


def _names(paths: list[Path]) -> list[str]:
    """The shortest end of each path that tells it from the others."""
    depth = 1
    while True:
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
        depth += 1


def thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most about MAX_ROWS: evenly over the run, and all that have a held-out reward or an alarm while there is room."""
    if len(rows) <= MAX_ROWS:
        return rows
    step = -(-2 * len(rows) // MAX_ROWS)
    marked = [i for i, row in enumerate(rows) if any(key.startswith(("reward/heldout", "alarm/")) for key in row)]
    kept = {*range(0, len(rows), step), len(rows) - 1, *every_nth(marked, MAX_ROWS // 2)}
    return [rows[i] for i in sorted(kept)]


def every_nth(values: list[int], limit: int) -> list[int]:
    """At most `limit` of them, evenly, the first and the last among them."""
    if len(values) <= limit:
        return values
    if limit < 2:
        return values[-limit:] if limit else []
    return [values[i * (len(values) - 1) // (limit - 1)] for i in range(limit)]


def _json(path: Path) -> dict[str, Any] | None:
    """None for a file that is not there, not yet whole, or no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))
