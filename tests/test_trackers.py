"""Weights & Biases as a tracker: what reaches its package, and what is said where it is not there."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verst.config.trackers import TrackerConfig, WandbConfig
from verst.errors import ConfigError
from verst.loops.trackers import check_trackers, make_trackers

CONFIG = TrackerConfig(tensorboard=False, wandb=WandbConfig(project="digits", mode="offline"))


class Run:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.logged, self.ended = options, [], False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.ended = True


class Package(types.ModuleType):
    """As much of the package `wandb` as a tracker uses."""

    class Error(Exception): ...

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        self.runs: list[Run] = []
        self.refuses = False

    def Image(self, picture: np.ndarray) -> tuple[str, tuple[int, ...]]:
        return "image", picture.shape

    def init(self, **options: Any) -> Run:
        if self.refuses:
            raise self.Error("api_key not configured")
        self.runs.append(Run(options))
        return self.runs[-1]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    there = Package()
    monkeypatch.setitem(sys.modules, "wandb", there)
    return there


def test_a_run_that_goes_on_is_the_same_run_there(package: Package, tmp_path: Path) -> None:
    for last in (0, 7):
        (tracker,) = make_trackers(CONFIG, tmp_path, name="mine", recipe={"run": {"seed": 1}}, resume_after=last)
        tracker.scalars(last + 1, {"reward/heldout": 0.5})
        tracker.image(last + 1, "samples/heldout", np.zeros((4, 6, 3), dtype=np.uint8))
        tracker.close()
    first, second = package.runs
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


def test_what_it_refuses_is_one_error(package: Package, tmp_path: Path) -> None:
    package.refuses = True
    with pytest.raises(
        ConfigError, match=r"trackers\.wandb \(project 'digits', mode offline\): api_key not configured"
    ):
        make_trackers(CONFIG, tmp_path, name="mine", recipe={}, resume_after=0)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(ConfigError, match=r"trackers\.wandb needs the package wandb"):
        check_trackers(CONFIG)
