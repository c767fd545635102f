"""Checkpoints: whole or not at all, verified before they are read, and the same run on any number of ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_fixtures import recipe_with
from torch import Tensor
from trainer_fixtures import LORA, largest_difference, one_rank, shares_of

from verst.errors import CheckpointError
from verst.trainer import checkpoint
from verst.trainer.rl import RlTrainer

EMA = "trainer.ema_decay=0.9"


def small_tensors(fill: float = 1.0) -> dict[str, Tensor]:
    return {"model.a": torch.full((300,), fill), "model.b": torch.arange(5.0), "num_steps": torch.tensor(3)}


def saved(root: Path, iteration: int, tensors: dict[str, Tensor] | None = None, *, keep: int = 10) -> Path:
    """A published checkpoint."""
    partial = checkpoint.partial_folder(root, iteration)
    checkpoint.write_tensors(partial, tensors or small_tensors(iteration), alone=True)
    return checkpoint.publish(root, iteration, {"iteration": iteration}, keep=keep)


def test_the_best_stays_besides_the_newest_and_is_named(tmp_path: Path) -> None:
    assert checkpoint.best_folder(tmp_path) is None
    best = {0: 0, 1: 1, 2: 1, 3: 1, 4: 4, 5: 4}
    kept = {}
    for iteration, number in best.items():
        checkpoint.write_tensors(checkpoint.partial_folder(tmp_path, iteration), small_tensors(), alone=True)
        checkpoint.publish(tmp_path, iteration, {"iteration": iteration}, keep=1, best=number)
        kept[iteration] = [checkpoint.iteration_of(folder) for folder in checkpoint.published(tmp_path)]
        assert checkpoint.best_folder(tmp_path) == checkpoint.step_folder(tmp_path, number)
    assert kept == {0: [0], 1: [1], 2: [1, 2], 3: [1, 3], 4: [4], 5: [4, 5]}
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json cannot be read"):
        checkpoint.best_folder(tmp_path)


def loaded(folder: Path) -> dict[str, Tensor]:
    checkpoint.read_state(folder)
    into = {name: torch.zeros_like(value) for name, value in small_tensors().items()}
    checkpoint.read_tensors(folder, into, alone=True)
    return into


def whole(trainer: RlTrainer) -> dict[str, Tensor]:
    """All state of a trainer, unsharded."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in trainer.core.tensors().items()
    }


@pytest.mark.parametrize("finetune", ['model.finetune={type="full"}', LORA])
def test_round_trip_is_bitwise_and_training_goes_on_the_same(tmp_path: Path, finetune: str) -> None:
    recipe = recipe_with(tmp_path, finetune, EMA, "trainer.schedule=linear", "trainer.warmup_steps=2")
    rollouts = [shares_of(recipe, rollout=rollout)[0] for rollout in range(3)]
    root = tmp_path / "checkpoints"
    with one_rank(recipe) as trainer:
        trainer.update(rollouts[0])
        trainer.update(rollouts[1])
        trainer.save(root, 2)
        folder = checkpoint.publish(root, 2, {"iteration": 2, "note": "é"}, keep=1)
        at_save = whole(trainer)
        last = trainer.update(rollouts[2])
        expected = whole(trainer)
    with one_rank(recipe) as trainer:
        assert checkpoint.read_state(folder) == {"iteration": 2, "note": "é"}
        trainer.load(folder)
        assert trainer.core.num_steps == 2
        assert largest_difference(whole(trainer), at_save) == 0.0
        again = trainer.update(rollouts[2])
        assert largest_difference(whole(trainer), expected) == 0.0
    assert again == last
    assert largest_difference(at_save, expected) > 1e-4
    kinds = {name.split(".")[0] for name in at_save} | {name.rsplit(".", 1)[1] for name in at_save}
    assert {"model", "optimizer", "ema", "exp_avg", "exp_avg_sq", "step"} <= kinds


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with one_rank(recipe_with(tmp_path, LORA)) as trainer:
        trainer.save(root, 1)
    folder = checkpoint.publish(root, 1, {}, keep=1)
    for other in ((), ('model.finetune={type="lora", rank=4, alpha=4.0}',), (LORA, EMA)):
        with one_rank(recipe_with(tmp_path, *other)) as trainer:
            before = trainer.weights()
            with pytest.raises(CheckpointError, match="step_00000001 does not fit this run"):
                trainer.load(folder)
            assert largest_difference(before, trainer.weights()) == 0.0


def test_partial_folder_is_ignored_and_swept(tmp_path: Path) -> None:
    good = saved(tmp_path, 1)
    checkpoint.write_tensors(checkpoint.partial_folder(tmp_path, 2), small_tensors(), alone=True)
    unfinished = checkpoint.step_folder(tmp_path, 3)  # by hand: no manifest
    unfinished.mkdir()
    (tmp_path / ".removed_step_00000000").mkdir()
    assert checkpoint.published(tmp_path) == [good]
    checkpoint.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]
    again = saved(tmp_path, 3)  # the same iteration again takes its place
    assert checkpoint.published(tmp_path) == [good, again]
    assert torch.equal(loaded(again)["model.a"], torch.full((300,), 3.0))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["tensors/__0_0.distcp", "tensors/.metadata", "run_state.json"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "bytes were written|were written: it is damaged"),
        (one_bit, "is not what was written"),
        (Path.unlink, "No such file or directory"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, file: str, damage: Callable[[Path], None], message: str) -> None:
    older, folder = saved(tmp_path, 1), saved(tmp_path, 2)
    damage(folder / file)
    with pytest.raises(CheckpointError, match=message) as error:
        loaded(folder)
    assert str(folder / file) in str(error.value)
    assert "Remove that checkpoint folder to go on from the one before it." in str(error.value)
    assert torch.equal(loaded(older)["model.a"], torch.full((300,), 1.0))


def test_unreadable_manifest_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    cut_short(folder / "manifest.json")
    with pytest.raises(CheckpointError, match=r"step_00000001.* cannot be read: .*Remove that checkpoint folder"):
        checkpoint.read_state(folder)


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    for iteration in (5, 10, 15, 20):
        saved(tmp_path, iteration, keep=2)
    assert [p.name for p in checkpoint.published(tmp_path)] == ["step_00000015", "step_00000020"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000015", "step_00000020"]


def test_non_finite_parameter_is_refused_by_name(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, EMA)
    root = tmp_path / "checkpoints"
    with one_rank(recipe) as trainer, torch.no_grad():
        trainer.core.named["transformer.proj_out.bias"].to_local()[3] = float("nan")  # type: ignore[attr-defined]
        with pytest.raises(
            CheckpointError, match=r"non-finite values in model\.transformer\.proj_out\.bias \(1 tensors\)"
        ):
            trainer.save(root, 1)
        assert not root.exists()
        assert trainer.core.ema is not None
        trainer.core.named["transformer.proj_out.bias"].zero_()
        trainer.core.ema.shadow["transformer.proj_out.bias"].fill_(float("inf"))
        with pytest.raises(CheckpointError, match=r"ema\.transformer\.proj_out\.bias"):
            trainer.save(root, 1)


SAVER = """
import resource, sys, torch
from pathlib import Path
from verst.errors import CheckpointError
from verst.trainer import checkpoint
from verst.trainer.parallel import join_mesh, open_store

root, limit, where, alone = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "alone"
if not alone:
    store = open_store("127.0.0.1", 0, rank=0, world_size=1)
    join_mesh(rank=0, world_size=1, store=store, device=torch.device("cpu"))

def save(iteration, count, note):
    tensors = {"w": torch.full((count,), float(iteration))}
    checkpoint.write_tensors(checkpoint.partial_folder(root, iteration), tensors, alone=alone)
    checkpoint.publish(root, iteration, {"iteration": iteration, "note": note}, keep=5)

save(1, 1000, "")
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    save(2, *((2_000_000, "") if where == "tensors" else (1000, "x" * 2_000_000)))
except CheckpointError as error:
    print("CheckpointError:", error)
into = {"w": torch.zeros(1000)}
assert [p.name for p in checkpoint.published(root)] == ["step_00000001"]
assert checkpoint.read_state(checkpoint.step_folder(root, 1))["iteration"] == 1
checkpoint.read_tensors(checkpoint.step_folder(root, 1), into, alone=alone)
print("older:", float(into["w"].sum()), "in root:", [p.name for p in root.iterdir()])
"""
MESSAGE = "CheckpointError: checkpoint step_00000002 was not saved in {root}: {reason} ("
REMEDY = "MiB free). Earlier checkpoints are untouched; make room and run the same command again."
AFTERWARDS = "older: 1000.0 in root: ['step_00000001']"


@pytest.mark.parametrize(("where", "processes"), [("tensors", "alone"), ("tensors", "group"), ("state", "alone")])
def test_write_that_the_system_refuses(tmp_path: Path, where: str, processes: str) -> None:
    command = [sys.executable, "-c", SAVER, str(tmp_path), "100000", where, processes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert MESSAGE.format(root=tmp_path, reason="File too large") in done.stdout
    assert REMEDY in done.stdout
    assert AFTERWARDS in done.stdout


def test_full_disk(tmp_path: Path) -> None:
    """A real one: a tmpfs of 1 MiB in a mount namespace of the subprocess alone."""
    mount = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path)]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a tmpfs; the refused write above takes the same path")
    command += [sys.executable, "-c", SAVER, str(tmp_path), "0", "tensors", "group"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert MESSAGE.format(root=tmp_path, reason="No space left on device") in done.stdout
    assert REMEDY in done.stdout
    assert AFTERWARDS in done.stdout


ENDLESS_SAVER = """
import sys, torch
from pathlib import Path
from verst.trainer import checkpoint
root = Path(sys.argv[1])
for iteration in (1, 2):
    tensors = {"w": torch.zeros(1000 if iteration == 1 else int(sys.argv[2]))}
    checkpoint.write_tensors(checkpoint.partial_folder(root, iteration), tensors, alone=True)
    checkpoint.publish(root, iteration, {"iteration": iteration}, keep=5)
"""


def killed_while_it_writes(root: Path, count: int) -> bool:
    """Whether the kill came in time: while the tensors of the second checkpoint were on their way to disk."""
    saver = subprocess.Popen([sys.executable, "-c", ENDLESS_SAVER, str(root), str(count)])
    partial = checkpoint.partial_folder(root, 2)
    while saver.poll() is None and not any(partial.glob("tensors/*")):
        time.sleep(0.0005)
    saver.send_signal(signal.SIGKILL)
    saver.wait()
    return partial.exists()


def test_kill_in_the_middle_of_a_save_leaves_the_older_one(tmp_path: Path) -> None:
    for attempt, count in enumerate((10**6, 10**7, 10**8)):
        root = tmp_path / str(attempt)
        if killed_while_it_writes(root, count):
            break
    assert [p.name for p in checkpoint.published(root)] == ["step_00000001"]
    assert checkpoint.read_state(checkpoint.step_folder(root, 1)) == {"iteration": 1}
    checkpoint.sweep(root)
    assert [p.name for p in root.iterdir()] == ["step_00000001"]
