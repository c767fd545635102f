"""A run whose processes are killed before it has begun."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from async_fixtures import assert_same, run_here
from run_fixtures import recipe_with, start_run, write_recipe

pytestmark = pytest.mark.ray
SMALL = ("sampling.height=32", "sampling.width=32", "run.iterations=1", "checkpoint.every=1")


@pytest.fixture(autouse=True)
def own_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", here)


def test_what_ends_in_the_start_comes_back_and_the_run_is_the_same(tmp_path: Path) -> None:
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    for folder in (calm, stormy):
        folder.mkdir()
    without = recipe_with(calm, *SMALL, "rewards=[{type='python', path='run_rewards:bright', name='judge'}]")
    run_here(without)
    judge = f"{{type='python', path='run_rewards:BornAgain', name='judge', options={{born='{stormy / 'born'}'}}}}"
    changed = (*SMALL, f"rewards=[{judge}]")
    process = start_run(write_recipe(stormy, *changed), *changed)
    try:
        for title in ("ParserActor", "EngineActor.start"):
            child_of(process.pid, title).kill()
        output, _ = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert_same(without, recipe_with(stormy, *changed))
    log = stormy / "runs" / "run" / "events" / "supervision.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for process_name in ("parser 0", "engine 0", "reward judge 0"):
        assert [event["name"] for event in events if event["process"] == process_name] == ["fault", "restart"]


def test_a_trainer_that_ends_in_the_start_ends_the_run_with_a_diagnosis(tmp_path: Path) -> None:
    process = start_run(write_recipe(tmp_path, *SMALL), *SMALL)
    try:
        child_of(process.pid, "TrainerActor").kill()
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "the trainer rank 0 process ended while the run started: the trainer rank 0 process ended" in output
    assert "likely cause: killed by a signal from outside" in output
    assert "its last log lines:" in output
    assert "Traceback" not in output


def child_of(driver: int, title: str) -> psutil.Process:
    """The first process under the driver that calls itself so: Ray's say what they do."""

    def found() -> Iterator[psutil.Process]:
        for child in psutil.Process(driver).children(recursive=True):
            try:
                if title in " ".join(child.cmdline()):
                    yield child
            except psutil.NoSuchProcess:
                continue

    deadline = time.monotonic() + 240
    while True:
        for child in found():
            return child
        assert time.monotonic() < deadline, title
        time.sleep(0.005)
