"""Metrics and pictures to trackio, whose files are on this machine."""

from __future__ import annotations

import contextlib
import contextvars
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verst.obs.kept_run import KeptRun, package


class TrackioLog:
    """One of its runs for each run folder; a thread of its own writes, and warns where it cannot.

    `trackio show` looks where it writes: TRACKIO_DIR, unset its folder in the Hugging Face cache.
    """

    def __init__(self, folder: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        """config: what the run is made of."""
        self._trackio = package("trackio")
        self._kept = KeptRun(folder, "trackio")
        with contextlib.redirect_stdout(io.StringIO()):
            # In a context of its own, or it would end the run once more, and say so, when the process exits.
            self._run = contextvars.copy_context().run(
                self._trackio.init,
                project=project,
                # It knows runs by name, and two run folders may have the same.
                name=f"{name}-{self._kept.own_id()}",
                resume="allow",
                config=dict(config),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        if self._kept.is_news(iteration):
            self._run.log(dict(values), step=iteration)
            self._kept.told(iteration)

    def image(self, iteration: int, tag: str, picture: np.ndarray) -> None:
        if self._kept.is_news(iteration):
            self._run.log({tag: self._trackio.Image(picture)}, step=iteration)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
