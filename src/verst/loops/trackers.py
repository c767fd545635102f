"""Where metrics and pictures go beside the run folder: one protocol, made from the recipe's table `trackers`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from verst.config.trackers import TrackerConfig
from verst.errors import ConfigError
from verst.obs.mlflow_log import MlflowLog
from verst.obs.tensorboard import TensorBoardLog
from verst.obs.trackio_log import TrackioLog
from verst.obs.wandb_log import WandbLog


class Tracker(Protocol):
    def scalars(self, iteration: int, values: Mapping[str, float]) -> None: ...

    def image(self, iteration: int, tag: str, picture: np.ndarray) -> None:
        """picture: uint8 [H, W, 3] RGB."""

    def close(self) -> None:
        """Waits until everything is where it belongs."""


_PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "trackio": ("trackio",)}
"""Field of the table, which is the extra's name too -> what is imported."""


def check_trackers(config: TrackerConfig) -> None:
    """Raises ConfigError, before anything starts, for one whose package is not there."""
    for field, modules in _PACKAGES.items():
        if getattr(config, field) is None:
            continue
        for module in modules:
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f'trackers.{field} needs the package {module}, which is not installed: pip install "verst[{field}]"'
                )


def make_trackers(
    config: TrackerConfig,
    folder: Path,
    *,
    name: str,
    recipe: Mapping[str, Any],
    resume_after: int,
    notice: Callable[[str], None],
) -> list[Tracker]:
    """resume_after: last iteration that counts: what an earlier process wrote of later ones is made again.

    notice: hears of a service that does not answer while the run goes on.
    """
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoardLog(folder / "tensorboard", resume_after=resume_after))
    if config.wandb is not None:
        wandb = config.wandb
        trackers.append(
            WandbLog(folder, project=wandb.project, entity=wandb.entity, mode=wandb.mode, name=name, config=recipe)
        )
    if config.mlflow is not None:
        mlflow = config.mlflow
        trackers.append(
            MlflowLog(folder, experiment=mlflow.experiment, uri=mlflow.uri, name=name, config=recipe, notice=notice)
        )
    if config.trackio is not None:
        trackers.append(TrackioLog(folder, project=config.trackio.project, name=name, config=recipe))
    return trackers
