"""`runs/<name>/`: everything a run leaves behind, and the rules of going on in it."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal

import tomli_w

from verst.config.recipe import Recipe, RlRecipe
from verst.errors import CheckpointError, ConfigError
from verst.obs.tables import flat
from verst.trainer import checkpoint

IfComplete = Literal["summary", "new"]

_FREE = (
    "run.iterations",
    "run.folder",
    "checkpoint.",
    "cluster.",
    "supervision.",
    "trackers.",
    "engine.",
    "rollout.parsers.",
    "trainer.ranks",
    "trainer.parallel.",
    "watch.alarms",
    "watch.gold",
    "watch.stop.",
    "watch.max_rollbacks",
    "data.cache.",
    "data.prefetch",
)
"""Keys that may change when a run goes on: they do not change what an iteration computes (ranks: to 1e-6)."""


class RunFolder:
    """Held by one driver at a time; the lock goes with the process, however it ends."""

    def __init__(self, recipe: Recipe, *, if_complete: IfComplete = "summary", resume: bool = True) -> None:
        """resume: False moves what the folder holds out of the way, complete or not.

        Raises ConfigError when another driver holds the folder, or it holds a run of another recipe."""
        self.recipe = recipe
        self.path = recipe.run.folder / recipe.run.name
        self._lock = self._acquire()
        begun = (self.path / "recipe.toml").exists()
        if begun and (not resume or (if_complete == "new" and self.summary() is not None)):
            self._lock.close()
            self._move_away()
            self._lock = self._acquire()
        self._check_recipe()
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.events = self.path / "events"
        for folder in (self.checkpoints, self.samples, self.events):
            folder.mkdir(exist_ok=True)
        checkpoint.sweep(self.checkpoints)
        _write_whole(self.path / "recipe.toml", tomli_w.dumps(dump(recipe)))
        self._write_facts()

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def latest(self) -> Path | None:
        """The newest published checkpoint."""
        folders = checkpoint.published(self.checkpoints)
        return folders[-1] if folders else None

    def summary(self) -> dict[str, Any] | None:
        """What a finished run says of itself; None while it is not finished."""
        return finished(self.path, self.recipe)

    def finish(self, summary: dict[str, Any]) -> None:
        _write_whole(self.path / "summary.json", json.dumps(summary, indent=1))

    def write_processes(self, pids: Mapping[str, Sequence[int]]) -> None:
        """Who is who among the processes of this run, for people with a process list."""
        _write_whole(self.path / "processes.json", json.dumps({"driver": [os.getpid()], **pids}, indent=1))

    def close(self) -> None:
        self._lock.close()

    def _acquire(self) -> IO[str]:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / ".lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ConfigError(
                f"{self.path} is in use by another verst process; wait for it, or give this run another run.name"
            ) from None
        return lock

    def _move_away(self) -> None:
        number = 1
        while (old := self.path.with_name(f"{self.path.name}-{number}")).exists():
            number += 1
        self.path.rename(old)

    def _check_recipe(self) -> None:
        """The same command goes on with the same run; another recipe must not."""
        path = self.path / "recipe.toml"
        if (
            not path.exists()
            or not (self.path / "checkpoints").exists()
            or not checkpoint.published(self.path / "checkpoints")
        ):
            return
        try:
            before = flat(tomllib.loads(path.read_text()))
        except tomllib.TOMLDecodeError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        now = flat(dump(self.recipe))
        free = _FREE if self.recipe.trainer.schedule == "constant" else _FREE[1:]
        changed = [
            f"{key}: {before.get(key, 'unset')} -> {now.get(key, 'unset')}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and not key.startswith(free)
        ]
        if changed:
            raise ConfigError(
                f"{self.path} holds a run of another recipe ({'; '.join(changed[:5])}). "
                "Give this run another run.name, or take the change back to go on with that one."
            )

    def _write_facts(self) -> None:
        path = self.path / "run.json"
        facts = json.loads(path.read_text()) if path.exists() else {"started": time.time(), **_facts()}
        facts.setdefault("resumed", []).append(time.time())
        _write_whole(path, json.dumps(facts, indent=1))


def finished(run: Path, recipe: Recipe) -> dict[str, Any] | None:
    """What a run folder says of itself at its end; None while it is not finished, as this recipe would have it."""
    path = run / "summary.json"
    if not path.exists():
        return None
    summary: dict[str, Any] = json.loads(path.read_text())
    ended = summary.get("early", False) and summary.get("rules") == ending_rules(recipe)
    done = ended or summary["iterations"] >= recipe.run.iterations
    return summary if done else None


def dump(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as TOML-ready tables."""
    return recipe.model_dump(mode="json", exclude_none=True)


def ending_rules(recipe: Recipe) -> dict[str, Any] | None:
    """What may end an RL run early: one that ended by other rules is not complete. None of a supervised run."""
    return recipe.watch.model_dump(mode="json") if isinstance(recipe, RlRecipe) else None


def stored_recipe(run: Path) -> Recipe:
    """The recipe of a run folder. Raises ConfigError where there is none."""
    from verst.config import load_recipe

    if not (run / "recipe.toml").exists():
        raise ConfigError(f"{run} is no run folder: it has no recipe.toml")
    return load_recipe(run / "recipe.toml")


def stored_rl_recipe(run: Path) -> RlRecipe:
    recipe = stored_recipe(run)
    if not isinstance(recipe, RlRecipe):
        raise ConfigError(f"{run} is an SFT run; its model is already a pipeline folder: {run / 'pipeline'}")
    return recipe


def _facts() -> dict[str, Any]:
    packages = ("verst", "torch", "diffusers", "transformers", "peft", "ray")
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        "git": _git_commit(),
    }


def _version(package: str) -> str | None:
    """None for a package that is not installed: verst itself from a source tree, Ray where only SFT runs."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    try:
        out = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip()


def _write_whole(path: Path, text: str) -> None:
    """Never half-written: beside, then one rename."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
