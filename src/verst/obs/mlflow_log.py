"""Metrics and pictures to MLflow: a database on this machine, or a tracking server."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from verst.errors import ConfigError
from verst.obs.kept_run import KeptRun, package
from verst.obs.tables import flat

_PARAMS = 100
"""Of one request, at most: MLflow refuses more."""
_FOR_GOOD = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
"""Its error codes for what will be no better the next time."""
_PARAM_CHARACTERS = 6000
"""Of one value, likewise."""


def mlflow_address(uri: str | None, folder: Path) -> str:
    """Where runs go: `uri`, else MLFLOW_TRACKING_URI, else mlflow.db beside the run folder `folder`."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder.parent / 'mlflow.db').resolve()}"


class MlflowLog:
    """One of its runs for each run folder. A thread delivers, so that no iteration waits for a server.

    What does not arrive is kept and sent again with the next; `notice` hears of it once, and at the end of what never arrived.
    What is refused for good is left out, and said each time: nothing waits behind it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        experiment: str,
        uri: str | None,
        name: str,
        config: Mapping[str, Any],
        notice: Callable[[str], None],
    ) -> None:
        """Raises ConfigError where MLflow refuses. config: what the run is made of."""
        self._mlflow = package("mlflow")
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it says each table that it makes
        self._notice = notice
        self._kept = KeptRun(folder, "mlflow")
        self._waiting: list[Callable[[], Any]] = []
        self._is_down = False
        address = mlflow_address(uri, folder)
        try:
            self._client = package("mlflow.tracking").MlflowClient(tracking_uri=address)
            self._run_id = self._open(folder, experiment, address, name, config)
        except self._mlflow.MlflowException as error:
            raise ConfigError(
                f"trackers.mlflow (experiment {experiment!r} at {address}): {error}; trackers.mlflow.uri says where runs go"
            ) from error
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        if not self._kept.is_news(iteration):
            return
        now_ms = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(key, value, now_ms, iteration) for key, value in values.items()]

        def send() -> None:
            self._client.log_batch(self._run_id, metrics=metrics)
            self._kept.told(iteration)

        self._thread.submit(self._deliver, send)

    def image(self, iteration: int, tag: str, picture: np.ndarray) -> None:
        """Among the run's artifacts, in the folder `images`."""
        if self._kept.is_news(iteration):
            self._thread.submit(
                self._deliver, lambda: self._client.log_image(self._run_id, picture, key=tag, step=iteration)
            )

    def close(self) -> None:
        self._thread.submit(self._deliver, lambda: self._client.set_terminated(self._run_id))
        self._thread.shutdown(wait=True)
        if self._waiting:
            self._notice(
                f"trackers.mlflow: the last {len(self._waiting)} of what was to be told did not arrive; metrics.jsonl has it"
            )

    def _open(self, folder: Path, experiment: str, address: str, name: str, config: Mapping[str, Any]) -> str:
        known = self._kept.id
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            return known
        found = self._client.get_experiment_by_name(experiment)
        if found is not None:
            experiment_id = found.experiment_id
        else:
            # A database's own choice of a place for pictures is a folder where the command happens to be started.
            beside = (folder.parent / "mlflow").resolve().as_uri() if address.startswith("sqlite:") else None
            experiment_id = self._client.create_experiment(experiment, artifact_location=beside)
        run_id = str(self._client.create_run(experiment_id, run_name=name).info.run_id)
        values = [
            self._mlflow.entities.Param(key, str(value)[:_PARAM_CHARACTERS]) for key, value in flat(config).items()
        ]
        for first in range(0, len(values), _PARAMS):
            self._client.log_batch(run_id, params=values[first : first + _PARAMS])
        self._kept.keep(run_id)
        return run_id

    def _deliver(self, send: Callable[[], Any]) -> None:
        """In order, all that waits; on the first that fails the rest waits for the next call."""
        self._waiting.append(send)
        while self._waiting:
            try:
                self._waiting[0]()
            except (self._mlflow.MlflowException, OSError) as error:
                if getattr(error, "error_code", None) in _FOR_GOOD:
                    self._notice(f"trackers.mlflow refuses, and goes on without it: {error}")
                    self._waiting.pop(0)
                    continue
                if not self._is_down:
                    self._notice(f"trackers.mlflow: {error}; what it was to be told is kept and sent again")
                self._is_down = True
                return
            self._waiting.pop(0)
        self._is_down = False
