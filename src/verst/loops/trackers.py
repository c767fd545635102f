"""Where metrics and pictures go beside the run folder: one protocol, made from the recipe's table `trackers`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from verst.config.trackers import TrackerConfig
from verst.errors import ConfigError
from verst.obs.tensorboard import TensorBoardLog
from verst.obs.wandb_log import WandbLog


class Tracker(Protocol):
    def scalars(self, iteration: int, values: Mapping[str, float]) -> None: ...

    def image(self, iteration: int, tag: str, picture: np.ndarray) -> None:
        """picture: uint8 [H, W, 3] RGB."""

    def close(self) -> None:
        """Waits until everything is where it belongs."""


def check_trackers(config: TrackerConfig) -> None:
    """Raises ConfigError, before anything starts, for one whose package is not there."""
    if config.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError('trackers.wandb needs the package wandb, which is not installed: pip install "verst[wandb]"')


def make_trackers(
    config: TrackerConfig, folder: Path, *, name: str, recipe: Mapping[str, Any], resume_after: int
) -> list[Tracker]:
    """resume_after: last iteration that counts: what an earlier process wrote of later ones is made again."""
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoardLog(folder / "tensorboard", resume_after=resume_after))
    if config.wandb is not None:
        wandb = config.wandb
        trackers.append(
            WandbLog(folder, project=wandb.project, entity=wandb.entity, mode=wandb.mode, name=name, config=recipe)
        )
    return trackers
