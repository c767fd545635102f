"""The reward curve of a run as PNG. matplotlib is imported when one is drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from verst.obs.metrics import read_metrics, series

WINDOW = 7
"""Iterations of the moving mean: a single one is noisy."""


def moving_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    starts = [max(0, i + 1 - window) for i in range(len(values))]
    return [sum(values[start : i + 1]) / (i + 1 - start) for i, start in enumerate(starts)]


def save_curve(metrics: Path, png: Path, *, title: str) -> Path | None:
    """Train reward, its moving mean and the held-out points of a metrics.jsonl; None where it has neither."""
    rows = read_metrics(metrics)
    train_x, train_y = series(rows, "reward/train_mean")
    heldout_x, heldout_y = series(rows, "reward/heldout")
    if not train_x and not heldout_x:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(train_x, train_y, color="tab:blue", alpha=0.3, linewidth=1, label="train")
    axes.plot(train_x, moving_mean(train_y), color="tab:blue", linewidth=2, label=f"train, mean of {WINDOW}")
    axes.plot(heldout_x, heldout_y, color="tab:orange", marker="o", linewidth=1, label="held-out")
    axes.set(xlabel="iteration", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    png.parent.mkdir(parents=True, exist_ok=True)
    partial = png.with_name(png.name + ".partial")
    figure.savefig(partial, format="png", dpi=120)
    os.replace(partial, png)
    return png
