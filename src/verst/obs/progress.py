"""What a person sees while a run goes on: a live panel in a terminal, one plain line an iteration elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verst.obs.curve import WINDOW, moving_mean

_BLOCKS = "▁▂▃▄▅▆▇█"
_IN_TURN = {"generate": "generate_s", "reward": "reward_s", "train": "train_s", "sync": "sync_s"}
_SIDE_BY_SIDE = {"wait for rollout": "wait_for_rollout_s", "train": "train_s", "sync": "sync_s"}
"""Stages that add up to an iteration, of a synchronous and an asynchronous run: label -> metric without `perf/`."""


class Progress(Protocol):
    """A run reports here once an iteration, and in words what it does in between."""

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """`iteration` is done; metrics by the names of docs/metrics.md, those that are missing are not shown."""

    def replay(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The same of an iteration that an earlier process of a resumed run did: it counts, but is no news."""

    def status(self, text: str) -> None:
        """What the run does now, e.g. "starting 1 engine"."""

    def doing(self, text: str) -> None:
        """The same, of what is too short or too frequent for a line in a log."""

    def notice(self, text: str) -> None:
        """Something that must be seen and stay, e.g. an alarm."""

    def close(self) -> None:
        """The last state stays on the screen."""


@dataclass(kw_only=True)
class ProgressState:
    """What both displays show, kept from the metrics."""

    name: str
    total: int
    """Iterations of the run."""
    iteration: int = 0
    """Last one done."""
    rewards: list[float] = field(default_factory=list)
    heldout: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Wall time of each iteration."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of the last iteration by stage."""

    def add(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.iteration = iteration
        for name, values in (
            ("reward/train_mean", self.rewards),
            ("reward/heldout", self.heldout),
            ("perf/iteration_s", self.seconds),
        ):
            if name in metrics:
                values.append(metrics[name])
        # A new dict: the display's thread may be walking through the old one.
        stages = _SIDE_BY_SIDE if "perf/wait_for_rollout_s" in metrics else _IN_TURN
        self.stages = {stage: metrics[f"perf/{name}"] for stage, name in stages.items() if f"perf/{name}" in metrics}

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the pace of the last iterations; None before the first."""
        last = self.seconds[-10:]
        return (self.total - self.iteration) * sum(last) / len(last) if last else None


def make_progress(*, name: str, total: int, quiet: bool = False, console: Console | None = None) -> Progress:
    """The display that fits: none when quiet, live in a terminal, lines elsewhere."""
    console = console or Console()
    state = ProgressState(name=name, total=total)
    if quiet:
        return QuietProgress()
    return LiveProgress(state, console) if console.is_terminal else LineProgress(state, console)


class QuietProgress:
    """Shows nothing."""

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        pass

    def replay(self, iteration: int, metrics: Mapping[str, float]) -> None:
        pass

    def status(self, text: str) -> None:
        pass

    def doing(self, text: str) -> None:
        pass

    def notice(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class LineProgress:
    """One line an iteration and one for each status, for log files."""

    def __init__(self, state: ProgressState, console: Console) -> None:
        self._state = state
        self._console = console

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._state.add(iteration, metrics)
        self.status(_line(self._state, metrics))

    def replay(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._state.add(iteration, metrics)

    def status(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def doing(self, text: str) -> None:
        pass

    def notice(self, text: str) -> None:
        self.status(text)

    def close(self) -> None:
        pass


class LiveProgress:
    """A panel that is redrawn in place."""

    def __init__(self, state: ProgressState, console: Console) -> None:
        self._state = state
        self._status = "starting"
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)
        self._live.start()

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._state.add(iteration, metrics)
        self._status = ""

    def replay(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._state.add(iteration, metrics)

    def status(self, text: str) -> None:
        self._status = text

    def doing(self, text: str) -> None:
        self.status(text)

    def notice(self, text: str) -> None:
        # Above the panel, where it is not drawn over.
        self._live.console.print(text, soft_wrap=True, markup=False, highlight=False, style="bold yellow")

    def close(self) -> None:
        self._status = ""
        self._live.stop()

    def _render(self) -> RenderableType:
        return panel(self._state, self._status)


def panel(state: ProgressState, status: str) -> Panel:
    """The live display of one moment."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("progress", ProgressBar(total=state.total, completed=state.iteration, width=40))
    if state.rewards:
        mean = moving_mean(state.rewards)
        table.add_row("reward", f"{state.rewards[-1]:.3f}, mean of {WINDOW}: {mean[-1]:.3f}  {sparkline(mean, 40)}")
    if state.heldout:
        table.add_row("held-out", _heldout(state))
    if state.seconds:
        table.add_row("s/iteration", f"{state.seconds[-1]:.2f} = {_stages(state)}")
    if state.eta_s is not None:
        table.add_row("time left", duration(state.eta_s))
    if status:
        table.add_row("now", Text(status))
    return Panel(table, title=Text(state.name), subtitle=f"iteration {state.iteration} of {state.total}", expand=False)


def sparkline(values: list[float], width: int) -> str:
    """The last `width` values as blocks between their least and greatest."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int(8 * (value - low) / span))] for value in shown)


def duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 05 s`, `12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _line(state: ProgressState, metrics: Mapping[str, float]) -> str:
    parts = [f"iteration {state.iteration}/{state.total}"]
    if "reward/train_mean" in metrics:
        parts.append(f"reward {state.rewards[-1]:.3f}")
    if "reward/heldout" in metrics:
        parts.append(f"held-out {_heldout(state)}")
    if "train/loss" in metrics:
        parts.append(f"loss {metrics['train/loss']:.4g}")
    if "perf/iteration_s" in metrics:
        parts.append(f"{state.seconds[-1]:.2f} s" + (f" = {_stages(state)}" if state.stages else ""))
    if state.eta_s is not None:
        parts.append(f"{duration(state.eta_s)} left")
    return "  ".join(parts)


def _heldout(state: ProgressState) -> str:
    first, last = state.heldout[0], state.heldout[-1]
    return f"{last:.3f}" if len(state.heldout) == 1 else f"{first:.3f} -> {last:.3f} ({last - first:+.3f})"


def _stages(state: ProgressState) -> str:
    return " + ".join(f"{stage} {seconds:.2f}" for stage, seconds in state.stages.items()) or "?"
