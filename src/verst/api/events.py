"""`verst.events` follows a run in any process by its folder; `verst.stream` trains and yields the same events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verst.api.result import Result
from verst.api.running import Background, Rewards, begin
from verst.config import RlRecipe, SftRecipe, load_recipe
from verst.errors import ConfigError
from verst.obs.events import read_events
from verst.obs.metrics import ITERATION, read_metrics
from verst.obs.samples import read_samples, saved_steps
from verst.obs.stamps import Stamps

POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class IterationDone:
    iteration: int
    """From 1; 0 is the evaluation before training."""
    metrics: dict[str, Any]
    """The row of metrics.jsonl; names in docs/metrics.md."""


@dataclass(frozen=True, kw_only=True)
class AlarmRaised:
    iteration: int
    alarm: str
    """Its type, e.g. reward_drop; see docs/watching.md."""
    action: str
    """log, stop or rollback."""
    text: str
    """What is wrong, with the numbers."""


@dataclass(frozen=True, kw_only=True)
class HeldOutSampled:
    iteration: int
    grid: Path
    """One picture of all."""
    pictures: tuple[Path, ...]
    """One a held-out prompt; of a clip its first frame."""
    samples: list[dict[str, Any]]
    """What is known of each: prompt, seed, reward, rewards, files."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    iteration: int
    folder: Path


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    iteration: int
    result: Result


Event = IterationDone | AlarmRaised | HeldOutSampled | CheckpointSaved | RunEnded
"""What `events` and `stream` yield: of an iteration pictures, row, alarms, checkpoint."""


async def events(run: str | Path | RlRecipe | SftRecipe, *, follow: bool = True) -> AsyncIterator[Event]:
    """What happens in a run of this or another process, from its beginning, each once; the last is RunEnded.

    run: a run folder, or a recipe, whose run may be yet to begin. follow: wait for what is to come until the run is
    complete, through pauses and restarts; False ends with what there is. Old pictures and checkpoints that the run has
    removed are left out. Raises ConfigError where there is no run, CheckpointError for a damaged folder.
    """
    folder = Path(run) if isinstance(run, str | Path) else run.run.folder / run.run.name
    recipe = folder / "recipe.toml"
    if not recipe.exists() and (not follow or isinstance(run, str | Path)):
        raise ConfigError(f"{folder} is no run folder: it has no recipe.toml")
    news = _News(folder)
    while True:
        complete = await asyncio.to_thread(news.complete)
        for event in await asyncio.to_thread(news.read):
            yield event
        if complete or not follow:
            break
        await asyncio.sleep(POLL_S)
    yield await asyncio.to_thread(_ended, folder)


async def stream(
    recipe: RlRecipe | SftRecipe, *, quiet: bool = True, resume: bool = True, rewards: Rewards | None = None
) -> AsyncIterator[Event]:
    """Train, as `train` does, in a thread beside this event loop, and yield what happens; the last is RunEnded.

    A run that goes on yields first what its folder tells of before. Leaving early, with `contextlib.aclosing`, ends the
    run at the next safe point with a checkpoint. Raises what `train` raises.
    """
    recipe, folder = await asyncio.to_thread(begin, recipe, resume=resume, rewards=rewards)
    try:
        if folder.summary() is None:
            run = Background(recipe, folder, quiet=quiet)
            try:
                news = _News(folder.path)
                alive = True
                while alive:
                    alive = run.alive
                    for event in await asyncio.to_thread(news.read):
                        yield event
                    if alive:
                        await asyncio.sleep(POLL_S)
            finally:
                if run.alive:
                    run.stop()
                    await asyncio.to_thread(run.join)
            run.check()
        else:
            for event in await asyncio.to_thread(_News(folder.path).read):
                yield event
    finally:
        folder.close()
    yield await asyncio.to_thread(_ended, folder.path)


def _ended(folder: Path) -> RunEnded:
    result = Result.of(folder)
    return RunEnded(iteration=result.iterations, result=result)


class _News:
    """What a run folder has that was not read before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[tuple[Any, ...]] = set()
        self._stamps = Stamps()
        self._complete = False

    def complete(self) -> bool:
        """Whether the run is, as its own recipe would have it."""
        from verst.loops.run_folder import finished

        recipe, summary = self._folder / "recipe.toml", self._folder / "summary.json"
        if self._stamps.changed(recipe, summary):
            self._complete = summary.exists() and finished(self._folder, load_recipe(recipe)) is not None
        return self._complete

    def read(self) -> list[Event]:
        """By iteration: pictures, the row, alarms, checkpoint, as they are written. Raises CheckpointError."""
        # Read backwards: what was written before what was seen is seen too.
        checkpoints, alarms, rows, heldout = [
            list[Event](kind) for kind in (self._checkpoints(), self._alarms(), self._rows(), self._heldout())
        ]
        return sorted([*heldout, *rows, *alarms, *checkpoints], key=lambda event: event.iteration)

    def _new(self, *what: Any) -> bool:
        new = what not in self._seen
        self._seen.add(what)
        return new

    def _rows(self) -> Iterator[IterationDone]:
        path = self._folder / "metrics.jsonl"
        for row in read_metrics(path) if self._stamps.changed(path) else ():
            if self._new("row", row[ITERATION]):
                yield IterationDone(iteration=row[ITERATION], metrics=row)

    def _alarms(self) -> Iterator[AlarmRaised]:
        path = self._folder / "events" / "alarms.jsonl"
        for event in read_events(path) if self._stamps.changed(path) else ():
            iteration, alarm = event["iteration"], event["type"]
            if self._new("alarm", iteration, alarm):
                yield AlarmRaised(iteration=iteration, alarm=alarm, action=event["action"], text=event["text"])

    def _heldout(self) -> Iterator[HeldOutSampled]:
        root = self._folder / "samples"
        for folder in saved_steps(root, "heldout"):
            iteration = int(folder.name.removeprefix("step_"))
            if not self._new("heldout", iteration):
                continue
            try:
                samples = read_samples(folder)
            except FileNotFoundError:
                # Removed since it was listed: only a bounded number is kept.
                continue
            pictures = tuple(folder / sample["picture"] for sample in samples)
            grid = root / f"{folder.name}.png"
            yield HeldOutSampled(iteration=iteration, grid=grid, pictures=pictures, samples=samples)

    def _checkpoints(self) -> Iterator[CheckpointSaved]:
        from verst.trainer.checkpoint import iteration_of, published

        for folder in published(self._folder / "checkpoints"):
            if self._new("checkpoint", iteration_of(folder)):
                yield CheckpointSaved(iteration=iteration_of(folder), folder=folder)
