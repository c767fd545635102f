"""Every family x algorithm x {LoRA, full}: what `verst bench matrix` prints, cell by cell."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from verst.config import parse_recipe
from verst.engine.worker import Worker
from verst.errors import ConfigError
from verst.families.tiny import TINY
from verst.loops.batch import make_batch
from verst.loops.matrix import ALGORITHMS, FINETUNES, one_rank, run_cell, sample_groups, tiny_recipe


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="verst-matrix-"))


EVERYWHERE = ("flow_grpo", "nft", "sft")
"""The others share pairs, tiles and forwards with these: they go through two experts, two streams, and one plain family."""
ELSEWHERE = ("wan2.2-a14b", "ltx2", "sd3")
CELLS = [
    *((name, algorithm) for name in sorted(TINY) for algorithm in EVERYWHERE),
    *((name, algorithm) for name in ELSEWHERE for algorithm in ALGORITHMS if algorithm not in EVERYWHERE),
]


@pytest.mark.parametrize("finetune", FINETUNES)
@pytest.mark.parametrize(("name", "algorithm"), CELLS)
def test_one_step_of_everything(name: str, algorithm: str, finetune: str) -> None:
    cell = run_cell(name, algorithm, finetune, folder=_folder())
    assert cell.ratio_max_deviation == (0.0 if algorithm in ("flow_grpo", "grpo_guard") else None)
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


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "sft"])
def test_streams_are_weighted_in_the_loss(algorithm: str) -> None:
    """The gradient of two streams is the weighted sum of each alone: sound counts half, or not at all."""
    tables = tiny_recipe("ltx2", algorithm, "full", folder=_folder()).model_dump(mode="json", exclude_none=True)
    tables["trainer"]["grad_clip"] = 1e9
    gradients = []
    for weights in ({"audio": 0.0}, {"visual": 0.0}, {"audio": 0.5}):
        recipe = parse_recipe({**tables, "algorithm": {**tables["algorithm"], "stream_weights": weights}})
        with one_rank(recipe) as trainer:
            trainer.update(make_batch(recipe, sample_groups(recipe, Worker(recipe.model.path))).shares[0])
            named = trainer.core.named
            gradients.append({n: p.grad.full_tensor().clone() for n, p in named.items() if p.grad is not None})
    picture, sound, both = gradients
    assert max(float(g.abs().max()) for g in sound.values()) > 0
    size = max(1.0, *(float(g.abs().max()) for g in both.values()))
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, picture[name] + 0.5 * sound[name], rtol=1e-4, atol=1e-6 * size)


def test_a_weight_of_a_stream_that_is_not_there_is_refused() -> None:
    tables = tiny_recipe("sd3", "flow_grpo", "lora", folder=_folder()).model_dump(mode="json", exclude_none=True)
    recipe = parse_recipe({**tables, "algorithm": {**tables["algorithm"], "stream_weights": {"audio": 1.0}}})
    with pytest.raises(ConfigError, match=r"names audio; sd3 has the streams visual"), one_rank(recipe):
        pass
