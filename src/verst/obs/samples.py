"""Samples of a run that people look at, one folder for each iteration that has some, and never more than a bound.

`samples/heldout/step_00000020/` has the fixed held-out samples after iteration 20, `samples/rollout/...` the best and the
worst of groups of its rollout: the files of each, and `samples.json` with what is known of them. A folder is published
by one rename.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verst.obs.media import save_clip, save_picture

Kind = Literal["heldout", "rollout"]
INDEX = "samples.json"


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """One sample as people see it."""

    media: np.ndarray
    """uint8 [F, H, W, 3], RGB; F = 1 for a picture."""
    prompt: str
    seed: int
    reward: float
    """Weighted sum; NaN where it is masked."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Of each reward that applies, unweighted; NaN where it failed."""
    place: Mapping[str, Any] = field(default_factory=dict)
    """Where it stands, e.g. group, index and rank ("best", "worst")."""
    fps: float | None = None
    audio: np.ndarray | None = None
    """fp32 [channels, n] in [-1, 1]."""
    sample_rate: int | None = None


def save_samples(root: Path, kind: Kind, iteration: int, samples: Sequence[ShownSample], *, keep: int) -> Path:
    """Write `root`/`kind`/step_<iteration>/, in place of an earlier one of that iteration.

    keep: folders of this kind that may be there afterwards, at least the first and the newest; which others go is
    chosen so that what stays covers the whole run evenly.
    """
    folder = step_folder(root, kind, iteration)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    rows = [_save(partial, f"{i:03d}", sample) for i, sample in enumerate(samples)]
    index = {"kind": kind, "iteration": iteration, "samples": rows}
    (partial / INDEX).write_text(json.dumps(index, allow_nan=False), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    _thin(saved_steps(root, kind), keep)
    return folder


def step_folder(root: Path, kind: Kind, iteration: int) -> Path:
    return root / kind / f"step_{iteration:08d}"


def saved_steps(root: Path, kind: Kind) -> list[Path]:
    """The folders of this kind, in the order of their iterations."""
    return sorted(path.parent for path in (root / kind).glob(f"step_*/{INDEX}"))


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """What `samples.json` of a published folder says of each sample."""
    rows: list[dict[str, Any]] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["samples"]
    return rows


def forget_after(root: Path, iteration: int) -> None:
    """Remove what was written of later iterations, and half-written folders: a resumed run makes them again."""
    kinds: tuple[Kind, ...] = ("heldout", "rollout")
    for folder in (path for kind in kinds for path in saved_steps(root, kind)):
        if int(folder.name.removeprefix("step_")) > iteration:
            shutil.rmtree(folder)
    for partial in root.glob("*/.step_*.partial"):
        shutil.rmtree(partial)


def _thin(folders: list[Path], keep: int) -> None:
    """One at a time, the one whose neighbours are nearest to each other."""
    while len(folders) > max(2, keep):
        steps = [int(folder.name.removeprefix("step_")) for folder in folders]
        _, place = min((steps[i + 1] - steps[i - 1], i) for i in range(1, len(steps) - 1))
        shutil.rmtree(folders.pop(place))


def _save(folder: Path, stem: str, sample: ShownSample) -> dict[str, Any]:
    frames, height, width, _ = sample.media.shape
    row: dict[str, Any] = {
        "picture": save_picture(folder, stem, sample.media[0]),
        "width": width,
        "height": height,
        "prompt": sample.prompt,
        "seed": sample.seed,
        "reward": _number(sample.reward),
        "rewards": {name: _number(value) for name, value in sample.rewards.items()},
        **sample.place,
    }
    if frames > 1:
        clip = save_clip(folder, stem, sample.media, fps=sample.fps, audio=sample.audio, sample_rate=sample.sample_rate)
        row |= {"clip": clip, "frames": frames, "fps": sample.fps, "sound": sample.audio is not None}
    return row


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
