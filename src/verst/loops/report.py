"""What a run writes and shows: metrics, TensorBoard, spans, pictures, curve, progress, closing summary."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verst.config.plan import lanes
from verst.config.recipe import Recipe, RlRecipe
from verst.config.watch import HELDOUT as HELDOUT
from verst.loops.ledger import Ledger
from verst.loops.run_folder import RunFolder, ending_rules
from verst.loops.shown import SeenGroup
from verst.loops.trackers import Tracker, check_trackers, make_trackers
from verst.loops.watch import RaisedAlarm
from verst.obs.alarms import ROLLED_BACK_TO
from verst.obs.curve import save_curve
from verst.obs.events import EventLog
from verst.obs.groups import add_group
from verst.obs.images import before_after, grid, load_picture, padded, save_png
from verst.obs.metrics import MetricsLog, read_metrics, series
from verst.obs.progress import make_progress
from verst.obs.samples import ShownSample, forget_after, read_samples, save_samples, saved_steps
from verst.obs.spans import FILE, STARTED, Spans
from verst.obs.summary import RunSummary, print_summary


class Report:
    """One driver's reporting; `iteration` is where the run goes on from."""

    def __init__(self, recipe: Recipe, folder: RunFolder, *, quiet: bool) -> None:
        check_trackers(recipe.trackers)
        self._recipe = recipe
        self._folder = folder
        self._quiet = quiet
        self._started = time.monotonic()
        self._metrics = MetricsLog(folder.metrics)
        self._events = EventLog(folder.events / FILE, flush_s=1.0)
        self.spans = Spans(self._events, capacity=lanes(recipe) if isinstance(recipe, RlRecipe) else {})
        """Takes down where the time goes."""
        self._events.event(STARTED)
        self._ledger = Ledger(folder.path / "trained.jsonl")
        self._alarms = EventLog(folder.events / "alarms.jsonl")
        self._supervision = EventLog(folder.events / "supervision.jsonl")
        self._groups = EventLog(folder.events / "groups.jsonl")
        self._progress = make_progress(name=recipe.run.name, total=recipe.run.iterations, quiet=quiet)
        self._trackers: list[Tracker] = []
        self._masked = 0

    def resume_at(self, iteration: int) -> None:
        """Forget what an earlier process wrote of later iterations: they are made again."""
        self._metrics.truncate_after(iteration)
        self._ledger.truncate_after(iteration)
        forget_after(self._folder.samples, iteration)
        for row in read_metrics(self._folder.metrics):
            self._progress.replay(int(row["iteration"]), {k: v for k, v in row.items() if isinstance(v, float)})
        self._close_trackers()
        self._trackers = make_trackers(
            self._recipe.trackers,
            self._folder.path,
            name=self._recipe.run.name,
            recipe=self._recipe.model_dump(mode="json"),
            resume_after=iteration,
            notice=self.notice,
        )

    def supervision(self, name: str, event: Mapping[str, str | int | float]) -> None:
        """A fault, a hang or a restart of one of the run's processes."""
        self._supervision.event(name, **event)
        said = {key: value for key, value in event.items() if key in ("process", "reason", "cause", "seconds")}
        self._progress.notice(f"{name}: " + ", ".join(f"{key} {value}" for key, value in said.items()))

    def status(self, text: str) -> None:
        self._progress.status(text)

    def doing(self, text: str) -> None:
        """What a live display says until the next iteration; no line of a log."""
        self._progress.doing(text)

    def notice(self, text: str) -> None:
        """A line that stays in the terminal."""
        self._progress.notice(text)

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._masked += int(metrics.get("reward/num_masked", 0))
        self._metrics.append(iteration, metrics)
        self._events.flush()
        for tracker in self._trackers:
            tracker.scalars(iteration, metrics)
        self._progress.update(iteration, metrics)
        if HELDOUT in metrics:
            self._draw_curve()

    def trained(self, row: Mapping[str, Any]) -> None:
        """What an iteration was trained on; see `verst.loops.ledger`."""
        self._ledger.append(row)

    def alarms(self, iteration: int, raised: Sequence[RaisedAlarm]) -> None:
        """Those that are news after this iteration."""
        for alarm in raised:
            self._alarms.event("alarm", iteration=iteration, **dataclasses.asdict(alarm))
            self._progress.notice(f"iteration {iteration}: alarm {alarm.type} ({alarm.action}): {alarm.text}")

    def heldout(self, iteration: int, samples: Sequence[ShownSample]) -> None:
        """The fixed held-out samples as they are now."""
        captions = [f"{s.prompt}  {'masked' if math.isnan(s.reward) else f'{s.reward:.2f}'}" for s in samples]
        picture = grid(padded([sample.media[0] for sample in samples]), captions)
        save_png(self._folder.samples / f"step_{iteration:08d}.png", picture)
        save_samples(self._folder.samples, "heldout", iteration, samples, keep=self._recipe.trackers.sample_iterations)
        for tracker in self._trackers:
            tracker.image(iteration, "samples/heldout", picture)

    def groups(self, iteration: int, groups: Sequence[SeenGroup]) -> None:
        """All groups of a rollout; where they are due the best and the worst samples of some."""
        for number, group in enumerate(groups):
            add_group(
                self._groups,
                iteration=iteration,
                group=number,
                prompt=group.prompt,
                rewards=group.rewards,
                by_reward=group.by_reward,
                dropped_by=group.dropped_by,
            )
        trackers = self._recipe.trackers
        if not trackers.samples_every or iteration % trackers.samples_every:
            return
        samples = [s for n, group in enumerate(groups[: trackers.sample_groups]) for s in group.extremes(n)]
        if samples:
            keep = trackers.sample_iterations
            save_samples(self._folder.samples, "rollout", iteration, samples, keep=keep)

    def finish(
        self, iteration: int, *, early: bool = False, why: str | None = None, result: Path | None = None
    ) -> None:
        """Curve, before/after picture and closing summary of a run that reached its end.

        early: a stop rule ended it before its last iteration; why: in words. result: a model folder that it wrote.
        """
        rows = read_metrics(self._folder.metrics)
        _, heldout = series(rows, HELDOUT)
        before, after = (heldout[0], heldout[-1]) if heldout else (None, None)
        paths = {"run folder": self._folder.path, "metrics": self._folder.metrics}
        curve = self._draw_curve()
        if curve is not None:
            paths["reward curve"] = curve
        strip = self._draw_strip()
        if strip is not None:
            paths["before / after"] = strip
        latest = self._folder.latest()
        if latest is not None:
            paths["checkpoint"] = latest
        if result is not None:
            paths["model"] = result
        self._progress.close()
        self._folder.finish(
            {
                "iterations": iteration,
                "early": early,
                "why": why,
                "rules": ending_rules(self._recipe),
                "heldout_before": before,
                "heldout_after": after,
            }
        )
        if not self._quiet:
            print_summary(
                RunSummary(
                    name=self._recipe.run.name,
                    iterations=iteration,
                    seconds=time.monotonic() - self._started,
                    heldout_before=before,
                    heldout_after=after,
                    paths=paths,
                    notes=tuple(self._notes(rows, why)),
                )
            )

    def _notes(self, rows: Sequence[Mapping[str, Any]], why: str | None) -> Iterator[str]:
        if why is not None:
            yield f"ended by the watch: {why}"
        if self._masked:
            yield f"{self._masked} samples had no reward and were left out"
        for name in sorted({key for row in rows for key in row if key.startswith("alarm/")}):
            stood = [int(row["iteration"]) for row in rows if name in row]
            yield f"alarm {name.removeprefix('alarm/')}: stood at {len(stood)} iterations, {stood[0]} to {stood[-1]}"
        undone = [f"{row['iteration']} to {row[ROLLED_BACK_TO]:.0f}" for row in rows if ROLLED_BACK_TO in row]
        if undone:
            yield f"rolled back from iteration {', '.join(undone)}"

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        self._events.close()
        self._ledger.close()
        self._alarms.close()
        self._supervision.close()
        self._groups.close()
        self._close_trackers()

    def _close_trackers(self) -> None:
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.close()

    def _draw_curve(self) -> Any:
        return save_curve(self._folder.metrics, self._folder.path / "reward_curve.png", title=self._recipe.run.name)

    def _draw_strip(self) -> Any:
        steps = saved_steps(self._folder.samples, "heldout")
        if len(steps) < 2:
            return None
        rows = [read_samples(step)[:8] for step in (steps[0], steps[-1])]
        before, after = (
            padded([load_picture(step / row["picture"]) for row in shown])
            for step, shown in zip((steps[0], steps[-1]), rows, strict=True)
        )
        if before.shape != after.shape:
            return None
        strip = before_after(before, after, [row["prompt"] for row in rows[1]])
        return save_png(self._folder.path / "before_after.png", strip)
