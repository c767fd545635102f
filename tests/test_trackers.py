"""Trackers whose packages are extras: what reaches each package, and what is said where it is not there."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verst.config.trackers import MlflowConfig, TrackerConfig, TrackioConfig, WandbConfig
from verst.errors import ConfigError
from verst.loops.trackers import Tracker, check_trackers, make_trackers

WANDB = TrackerConfig(tensorboard=False, wandb=WandbConfig(project="digits", mode="offline"))
MLFLOW = TrackerConfig(tensorboard=False, mlflow=MlflowConfig(experiment="digits"))
TRACKIO = TrackerConfig(tensorboard=False, trackio=TrackioConfig(project="digits"))
PICTURE = np.zeros((4, 6, 3), dtype=np.uint8)


class Run:
    """Of wandb or trackio."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.logged, self.ended = options, [], False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        print("finished")
        self.ended = True


class Package(types.ModuleType):
    """As much of the packages `wandb` and `trackio` as a tracker uses."""

    class Error(Exception): ...

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        self.runs: list[Run] = []
        self.refuses = False

    def Image(self, picture: np.ndarray) -> tuple[str, tuple[int, ...]]:
        return "image", picture.shape

    def init(self, **options: Any) -> Run:
        if self.refuses:
            raise self.Error("api_key not configured")
        print("initialized")
        self.runs.append(Run(options))
        return self.runs[-1]


class MlflowException(Exception):
    def __init__(self, message: str, error_code: str = "INTERNAL_ERROR") -> None:
        super().__init__(message)
        self.error_code = error_code


class Server:
    """What an MLflow server knows, and its client: metrics as (step, key, value)."""

    def __init__(self) -> None:
        self.address, self.experiments, self.is_down = "", {}, False
        self.metrics: list[tuple[int, str, float]] = []
        self.params: dict[str, str] = {}
        self.pictures: list[tuple[int, str, tuple[int, ...]]] = []
        self.states: list[tuple[str, str]] = []

    def client(self, tracking_uri: str) -> Server:
        if "nowhere" in tracking_uri:
            raise MlflowException("unsupported URI")
        self.address = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return self.experiments.get(name)

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.experiments[name] = types.SimpleNamespace(experiment_id="1", place=artifact_location)
        return "1"

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        self.states.append((run_name, "created"))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"{experiment_id}-{run_name}"))

    def update_run(self, run_id: str, status: str) -> None:
        self.states.append((run_id, status))

    def log_batch(self, run_id: str, metrics: tuple[Any, ...] = (), params: tuple[Any, ...] = ()) -> None:
        if self.is_down:
            raise MlflowException("connection refused")
        assert len(params) <= 100
        if any("?" in metric.key for metric in metrics):
            raise MlflowException("Invalid metric name", "INVALID_PARAMETER_VALUE")
        self.metrics += [(metric.step, metric.key, metric.value) for metric in metrics]
        self.params |= {param.key: param.value for param in params}

    def log_image(self, run_id: str, picture: np.ndarray, key: str, step: int) -> None:
        self.pictures.append((step, key, picture.shape))

    def set_terminated(self, run_id: str) -> None:
        self.states.append((run_id, "ended"))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Package:
    return put(monkeypatch, "wandb", Package("wandb"))


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> Package:
    return put(monkeypatch, "trackio", Package("trackio"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    there = Server()
    entities = types.SimpleNamespace(
        Metric=lambda key, value, timestamp, step: types.SimpleNamespace(key=key, value=value, step=step),
        Param=lambda key, value: types.SimpleNamespace(key=key, value=value),
    )
    put(monkeypatch, "mlflow", types.SimpleNamespace(MlflowException=MlflowException, entities=entities))
    put(monkeypatch, "mlflow.tracking", types.SimpleNamespace(MlflowClient=there.client))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return there


def put(monkeypatch: pytest.MonkeyPatch, name: str, package: Any) -> Any:
    monkeypatch.setitem(sys.modules, name, package)
    return package


def opened(config: TrackerConfig, folder: Path, said: list[str] | None = None, recipe: Any = None) -> Tracker:
    notice = (said if said is not None else []).append
    (tracker,) = make_trackers(
        config, folder, name="mine", recipe=recipe or {"run": {"seed": 1}}, resume_after=0, notice=notice
    )
    return tracker


def test_a_run_that_goes_on_is_the_same_run_of_wandb(wandb: Package, tmp_path: Path) -> None:
    for iteration in (1, 8):
        tracker = opened(WANDB, tmp_path)
        tracker.scalars(iteration, {"reward/heldout": 0.5})
        tracker.image(iteration, "samples/heldout", PICTURE)
        tracker.close()
    first, second = wandb.runs
    assert first.options["id"] == second.options["id"] == (tmp_path / "wandb_id").read_text()
    assert {key: first.options[key] for key in ("project", "mode", "name", "resume", "config")} == {
        "project": "digits",
        "mode": "offline",
        "name": "mine",
        "resume": "allow",
        "config": {"run": {"seed": 1}},
    }
    assert second.logged == [(8, {"reward/heldout": 0.5}), (8, {"samples/heldout": ("image", (4, 6, 3))})]
    assert first.ended
    assert second.ended


def test_a_run_that_goes_on_is_the_same_run_of_trackio_which_prints_nothing(
    trackio: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for iterations in ((1, 2, 3), (3, 4)):
        tracker = opened(TRACKIO, tmp_path)
        for iteration in iterations:
            tracker.image(iteration, "samples/heldout", PICTURE)
            tracker.scalars(iteration, {"reward/heldout": iteration / 10})
        tracker.close()
    first, second = trackio.runs
    name = f"mine-{(tmp_path / 'trackio_id').read_text()}"
    assert [(run.options["name"], run.options["resume"], run.ended) for run in trackio.runs] == [
        (name, "allow", True)
    ] * 2
    assert [step for step, _ in first.logged] == [1, 1, 2, 2, 3, 3]
    # Iteration 3 is made again: its first values stay.
    assert second.logged == [(4, {"samples/heldout": ("image", (4, 6, 3))}), (4, {"reward/heldout": 0.4})]
    assert capsys.readouterr().out == ""


def test_a_run_that_goes_on_is_the_same_run_of_mlflow(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    recipe = {"run": {"seed": 1}, "many": {str(number): number for number in range(150)}}
    for iterations in ((1, 2, 3), (3, 4)):
        tracker = opened(MLFLOW, folder, recipe=recipe)
        for iteration in iterations:
            tracker.image(iteration, "samples/heldout", PICTURE)
            tracker.scalars(iteration, {"reward/heldout": iteration / 10})
        tracker.close()
    assert server.address == f"sqlite:///{folder.parent.resolve()}/mlflow.db"
    assert server.experiments["digits"].place == (folder.parent / "mlflow").resolve().as_uri()
    assert server.metrics == [(step, "reward/heldout", step / 10) for step in (1, 2, 3, 4)]
    assert server.pictures == [(step, "samples/heldout", (4, 6, 3)) for step in (1, 2, 3, 4)]
    assert server.params == {"run.seed": "1"} | {f"many.{number}": str(number) for number in range(150)}
    assert server.states == [("mine", "created"), ("1-mine", "ended"), ("1-mine", "RUNNING"), ("1-mine", "ended")]


def test_mlflow_goes_where_the_recipe_or_the_environment_says(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://theirs:5000")
    opened(MLFLOW, tmp_path).close()
    assert server.address == "http://theirs:5000"
    assert server.experiments["digits"].place is None
    config = TrackerConfig(tensorboard=False, mlflow=MlflowConfig(experiment="digits", uri="http://ours:5000"))
    opened(config, tmp_path).close()
    assert server.address == "http://ours:5000"


def test_what_mlflow_does_not_take_is_said_once_and_sent_again(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    tracker = opened(MLFLOW, tmp_path, said)
    server.is_down = True
    for iteration in (1, 2):
        tracker.scalars(iteration, {"train/loss": float(iteration)})
    tracker._thread.submit(setattr, server, "is_down", False)  # type: ignore[attr-defined]  # after both were tried
    tracker.scalars(3, {"train/loss": 3.0})
    tracker.close()
    assert server.metrics == [(1, "train/loss", 1.0), (2, "train/loss", 2.0), (3, "train/loss", 3.0)]
    assert said == ["trackers.mlflow: connection refused; what it was to be told is kept and sent again"]
    assert (tmp_path / "mlflow_told").read_text() == "3"


def test_what_mlflow_refuses_for_good_holds_nothing_up(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    tracker = opened(MLFLOW, tmp_path, said)
    tracker.scalars(1, {"what?": 1.0})
    tracker.scalars(2, {"train/loss": 2.0})
    tracker.close()
    assert server.metrics == [(2, "train/loss", 2.0)]
    assert said == ["trackers.mlflow refuses, and goes on without it: Invalid metric name"]


def test_what_never_arrives_is_said_at_the_end(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    tracker = opened(MLFLOW, tmp_path, said)
    server.is_down = True
    tracker.scalars(1, {"train/loss": 1.0})
    tracker.close()
    assert len(said) == 2
    assert said[1].startswith("trackers.mlflow: the last 2 of what was to be told did not arrive")
    assert not (tmp_path / "mlflow_told").exists()


def test_what_they_refuse_is_one_error(wandb: Package, server: Server, tmp_path: Path) -> None:
    wandb.refuses = True
    with pytest.raises(
        ConfigError, match=r"trackers\.wandb \(project 'digits', mode offline\): api_key not configured"
    ):
        opened(WANDB, tmp_path)
    config = TrackerConfig(tensorboard=False, mlflow=MlflowConfig(experiment="digits", uri="nowhere://"))
    with pytest.raises(ConfigError, match=r"trackers\.mlflow \(experiment 'digits' at nowhere://\): unsupported URI"):
        opened(config, tmp_path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (WANDB, r'trackers\.wandb needs the package wandb.*verst\[wandb\]'),
        (MLFLOW, r'trackers\.mlflow needs the package mlflow.*verst\[mlflow\]'),
        (TRACKIO, r'trackers\.trackio needs the package trackio.*verst\[trackio\]'),
    ],
)  # fmt: skip
def test_a_package_that_is_not_there_is_named(
    config: TrackerConfig, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("wandb", "mlflow", "trackio"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(ConfigError, match=named):
        check_trackers(config)
