"""Rewards and filters that a recipe of the tests brings along."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

PHASES = {"evaluate": 1, "constant": 4, "raise": 12, "nan": 4, "flaky": 6, "evaluate again": 1}
"""What `Scripted` does in turn, and for how many calls. A rollout has 4 microgroups, a call may be made 3 times."""


def small_things(rewards: Mapping[str, Sequence[float]], prompt: str, metadata: Mapping[str, Any]) -> bool:
    """A filter that drops half of the words of run_fixtures."""
    return prompt in ("a red cat", "two birds", "a small robot", "a car")


def bright(media: Tensor, prompts: Sequence[str]) -> list[float]:
    return [float(picture.float().mean()) / 255 for picture in media]


def broken(media: Tensor, prompts: Sequence[str]) -> list[float]:
    raise RuntimeError("the judge is out")


def calm(latents: Mapping[str, Tensor], prompts: Sequence[str]) -> list[float]:
    """A reward of latents: the nearer the spread to 1 the better."""
    return [-abs(float(x.std()) - 1) for x in latents["visual"]]


class Trend:
    """Rises by `slope` with each call, above what tells samples apart: their mean brightness."""

    def __init__(self, slope: float) -> None:
        self._slope = slope
        self._calls = 0

    def score(self, media: Tensor, prompts: Sequence[str]) -> list[float]:
        self._calls += 1
        return [self._slope * self._calls + float(picture.float().mean()) / 255 for picture in media]


class BornAgain:
    """The first one that is made ends its process in that; the file `born` says that it was."""

    def __init__(self, born: str) -> None:
        if not Path(born).exists():
            Path(born).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def score(self, media: Tensor, prompts: Sequence[str]) -> list[float]:
        return bright(media, prompts)


class Scripted:
    """Goes through PHASES; each call leaves its phase as a line in the file `calls`, whatever process it is in."""

    def __init__(self, calls: str) -> None:
        self._calls = Path(calls)

    def score(self, media: Tensor, prompts: Sequence[str]) -> list[float]:
        done = self._calls.read_text().splitlines() if self._calls.exists() else []
        script = [name for name, count in PHASES.items() for _ in range(count)]
        phase = script[len(done)]
        turn = done.count(phase)
        with self._calls.open("a") as file:
            file.write(phase + "\n")
        if phase == "raise" or (phase == "flaky" and turn < 2):
            raise RuntimeError(f"no score in phase {phase}")
        if phase == "constant":
            return [0.5] * len(prompts)
        scores = [float(picture.float().mean()) for picture in media]
        if phase == "nan" and turn == 1:
            scores[0] = math.nan
        return scores
