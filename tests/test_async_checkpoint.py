"""Checkpoints written in the background: what was staged is what is saved, and only whole ones appear."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import recipe_with
from trainer_fixtures import LORA, largest_difference, one_rank, shares_of

from verst.config.sections import RlCheckpointConfig
from verst.errors import CheckpointError
from verst.loops.checkpoints import Checkpoints
from verst.trainer import checkpoint

ASYNC = "checkpoint.async_save=true"


def test_training_goes_on_while_the_older_state_is_written(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, LORA, ASYNC)
    rollouts = [shares_of(recipe, rollout=rollout)[0] for rollout in range(2)]
    root = tmp_path / "checkpoints"
    with one_rank(recipe) as trainer:
        trainer.update(rollouts[0])
        at_save = trainer.weights()
        trainer.save(root, 1)
        trainer.update(rollouts[1])
        assert largest_difference(trainer.weights(), at_save) > 1e-4
        assert checkpoint.published(root) == []
        trainer.finish_save()
        assert trainer.saved()
        folder = checkpoint.publish(root, 1, {"iteration": 1}, keep=1)
        trainer.load(folder)
        assert largest_difference(trainer.weights(), at_save) == 0.0
        assert (folder / "adapter" / "adapter_model.safetensors").exists()
        with torch.no_grad():
            next(iter(trainer.core.named.values())).fill_(float("nan"))
        with pytest.raises(CheckpointError, match=r"non-finite values in model\.transformer\."):
            trainer.save(root, 2)
        assert not checkpoint.partial_folder(root, 2).exists()


def test_a_write_that_fails_is_said_when_it_is_asked_for(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, LORA, ASYNC)
    root = tmp_path / "checkpoints"
    with one_rank(recipe) as trainer:
        tensors = checkpoint.partial_folder(root, 1) / "tensors"
        tensors.parent.mkdir(parents=True)
        tensors.write_text("a file where a folder must be")
        trainer.save(root, 1)
        with pytest.raises(CheckpointError, match="checkpoint step_00000001 was not saved in"):
            trainer.finish_save()
        trainer.save(root, 2)
        trainer.finish_save()


class SlowTrainer:
    """Writes a tensor when it is told to, or fails."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.ready = False
        self.calls: list[str] = []

    async def save(self, root: Path, iteration: int) -> None:
        self.calls.append(f"save {iteration}")
        self.ready = False
        folder = checkpoint.partial_folder(root, iteration)
        checkpoint.write_tensors(folder, {"w": torch.full((3,), float(iteration))}, alone=True)

    async def saved(self) -> bool:
        if self.fails:
            raise CheckpointError("not saved: the disk is full")
        return self.ready

    async def finish_save(self) -> None:
        self.calls.append("finish")
        if self.fails:
            raise CheckpointError("not saved: the disk is full")


def names(root: Path) -> list[str]:
    return [folder.name for folder in checkpoint.published(root)]


def test_one_save_is_in_flight_and_appears_when_all_ranks_have_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = SlowTrainer()
        driver = Checkpoints(tmp_path, trainer, RlCheckpointConfig(async_save=True, keep=2))
        state: dict[str, Any] = {"iteration": 1}
        await driver.save(1, state, best=None)
        await driver.poll()
        assert names(tmp_path) == []
        trainer.ready = True
        await driver.poll()
        await driver.finish()
        assert names(tmp_path) == ["step_00000001"]
        await driver.save(2, {"iteration": 2}, best=None)
        await driver.save(3, {"iteration": 3}, best=None)  # waits for the one before
        assert names(tmp_path) == ["step_00000001", "step_00000002"]
        await driver.finish()
        assert names(tmp_path) == ["step_00000002", "step_00000003"]
        assert checkpoint.read_state(tmp_path / "step_00000003") == {"iteration": 3}
        assert trainer.calls == ["save 1", "save 2", "finish", "save 3", "finish"]

    asyncio.run(scenario())


@pytest.mark.parametrize("ask", ["poll", "finish", "save"])
def test_an_error_in_the_background_comes_out_at_the_next_call(tmp_path: Path, ask: str) -> None:
    async def scenario() -> None:
        trainer = SlowTrainer()
        driver = Checkpoints(tmp_path, trainer, RlCheckpointConfig(async_save=True))
        await driver.save(1, {}, best=None)
        trainer.fails = True
        with pytest.raises(CheckpointError, match="the disk is full"):
            await (driver.save(2, {}, best=None) if ask == "save" else getattr(driver, ask)())
        assert names(tmp_path) == []

    asyncio.run(scenario())


SAVER = """
import sys, time, torch
from pathlib import Path
from verst.trainer import checkpoint
from verst.trainer.parallel import join_mesh, open_store
root, count = Path(sys.argv[1]), int(sys.argv[2])
store = open_store("127.0.0.1", 0, rank=0, world_size=1)
join_mesh(rank=0, world_size=1, store=store, device=torch.device("cpu"))
saver = checkpoint.BackgroundSaver()
for iteration in (1, 2):
    tensors = {"w": torch.full((1000 if iteration == 1 else count,), float(iteration))}
    saver.begin(checkpoint.partial_folder(root, iteration), tensors)
    tensors["w"].zero_()
    saver.finish()
    checkpoint.publish(root, iteration, {"iteration": iteration}, keep=5)
time.sleep(60)
"""


def test_kill_during_a_background_write_leaves_the_last_published(tmp_path: Path) -> None:
    saver = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path), str(10**8)])
    partial = checkpoint.partial_folder(tmp_path, 2)
    while saver.poll() is None and not any(partial.glob("tensors/*")):
        time.sleep(0.0005)
    saver.send_signal(signal.SIGKILL)
    saver.wait()
    assert names(tmp_path) == ["step_00000001"]
    assert checkpoint.read_state(tmp_path / "step_00000001") == {"iteration": 1}
    into = {"w": torch.zeros(1000)}
    checkpoint.read_tensors(tmp_path / "step_00000001", into, alone=True)
    assert torch.equal(into["w"], torch.ones(1000))
    checkpoint.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
