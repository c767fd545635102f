"""Metrics and pictures to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verst.errors import ConfigError
from verst.obs.kept_run import KeptRun, package


class WandbLog:
    """Weights & Biases, one of its runs for each run folder, however often that goes on.

    It keeps the first value of an iteration that is made twice. Its key is in the environment (WANDB_API_KEY), or in its own login.
    """

    def __init__(
        self, folder: Path, *, project: str, entity: str | None, mode: str, name: str, config: Mapping[str, Any]
    ) -> None:
        """Raises ConfigError where W&B refuses. config: what the run is made of."""
        self._wandb = package("wandb")
        try:
            self._run = self._wandb.init(
                project=project,
                entity=entity,
                mode=mode,
                name=name,
                id=KeptRun(folder, "wandb").own_id(),
                resume="allow",
                dir=str(folder),
                config=dict(config),
            )
        except self._wandb.Error as error:
            raise ConfigError(
                f"trackers.wandb (project {project!r}, mode {mode}): {error}; log in with `wandb login`, or use "
                'mode = "offline" and `wandb sync` later'
            ) from error

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=iteration)

    def image(self, iteration: int, tag: str, picture: np.ndarray) -> None:
        self._run.log({tag: self._wandb.Image(picture)}, step=iteration)

    def close(self) -> None:
        self._run.finish()
