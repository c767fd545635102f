"""Every family x algorithm x {LoRA, full}: what `verst bench matrix` prints, cell by cell."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from verst.config import parse_recipe
from verst.engine.worker import Worker
from verst.families.tiny import TINY
from verst.loops.batch import make_batch
from verst.loops.matrix import ALGORITHMS, FINETUNES, one_rank, run_cell, sample_groups, tiny_recipe


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="verst-matrix-"))


@pytest.mark.parametrize("finetune", FINETUNES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", sorted(TINY))
def test_one_step_of_everything(name: str, algorithm: str, finetune: str) -> None:
    cell = run_cell(name, algorithm, finetune, folder=_folder())
    assert cell.ratio_max_deviation == (0.0 if algorithm == "flow_grpo" else None)
    assert cell.changed > 0
    assert cell.agreement == 0.0


def test_a_batch_of_one_agrees_to_the_bit() -> None:
    """Weights read from a file must lie as the trainer's do: one row goes through other kernels on unaligned memory."""
    tables = tiny_recipe("wan2.1", "flow_grpo", "full", folder=_folder()).model_dump(mode="json", exclude_none=True)
    tables["rollout"]["microgroup_size"] = tables["trainer"]["tile_size"] = 1
    recipe = parse_recipe(tables)
    worker = Worker(recipe.model.path)
    assert {p.data_ptr() % 64 for p in worker.components.transformer.parameters()} == {0}
    with one_rank(recipe) as trainer:
        groups = sample_groups(recipe, worker)
        policy = trainer.update(make_batch(recipe, groups).shares[0]).policy
    assert policy["ratio_max_deviation"] == policy["log_prob_max_difference"] == 0.0
