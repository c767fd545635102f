"""What lies in host memory: another place, the same bits. On a CPU the copies are made all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import base_tables, recipe_with
from torch import Tensor, nn
from trainer_fixtures import LORA, one_rank, shares_of

from verst.config import load_recipe, parse_recipe
from verst.errors import ConfigError
from verst.trainer import checkpoint
from verst.trainer.core import Ema
from verst.trainer.host import HostOptimizer

ALL = "trainer.offload={parameters=true, optimizer=true, reference=true}"
ON_CLEAN_SAMPLES = ('sampling.steps={type="none"}', "sampling.shared_initial_noise=false")
FROZEN = ("algorithm.kl_beta=0.5", 'algorithm.reference={type="frozen"}')
CASES: dict[str, tuple[str, ...]] = {
    "frozen": (*FROZEN, "trainer.ema_decay=0.5"),
    "average": ("algorithm.kl_beta=0.5", 'algorithm.reference={type="ema"}', "trainer.ema_decay=0.5"),
    "old": (*ON_CLEAN_SAMPLES, 'algorithm={type="nft", timestep_fraction=0.5}', LORA),
}


def test_steps_in_parts_are_the_same_bits() -> None:
    """Three parts, the middle one of two parameters; the state is the host's own tensors after each step."""
    torch.manual_seed(0)
    sizes = (12, 3, 5, 9)
    start = [torch.randn(size) for size in sizes]
    found = []
    for in_parts in (False, True):
        params = [nn.Parameter(value.clone()) for value in start]
        optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}], lr=0.01)
        take = optimizer.step
        for step in range(3):
            for number, p in enumerate(params):
                p.grad = torch.full_like(p, 0.1 * (step + number + 1))
            if in_parts and step == 1:
                # With state, as a trainer has it from the start.
                host = HostOptimizer(optimizer, part_bytes=4 * 8)
                assert [len(part) for part in host._parts()] == [1, 2, 1]
                moments = [optimizer.state[p]["exp_avg"] for p in params]
                take = host.step
            take()
        if in_parts:
            assert [optimizer.state[p]["exp_avg"] for p in params] == moments
            assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
        found.append([*params, *(optimizer.state[p]["exp_avg_sq"] for p in params)])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert not torch.equal(found[0][0], start[0])


def test_an_average_on_the_host_is_the_same_bits() -> None:
    named = {"a": nn.Parameter(torch.arange(4.0))}
    here, there = Ema(named, 0.5), Ema(named, 0.5, host=True)
    with torch.no_grad():
        named["a"].add_(1.0)
    for average in (here, there):
        average.update(named)
        with average.applied(named):
            assert named["a"].tolist() == [0.5, 1.5, 2.5, 3.5]
        assert named["a"].tolist() == [1.0, 2.0, 3.0, 4.0]


def _trained(recipe: Any, folder: Path | None = None) -> tuple[Any, dict[str, Tensor]]:
    """Metrics and tensors of two updates; with a folder, of a trainer that begins again between them."""
    with one_rank(recipe) as trainer:
        metrics = [trainer.update(shares_of(recipe)[0])]
        if folder is not None:
            trainer.save(folder, 1)
            checkpoint.publish(folder, 1, {}, keep=1)
        else:
            metrics.append(trainer.update(shares_of(recipe, rollout=1)[0]))
            return metrics, {name: value.clone() for name, value in trainer._state().items()}
    with one_rank(recipe) as trainer:
        trainer.load(checkpoint.step_folder(folder, 1))
        metrics.append(trainer.update(shares_of(recipe, rollout=1)[0]))
        return metrics, {name: value.clone() for name, value in trainer._state().items()}


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_the_same_bits(name: str, tmp_path: Path) -> None:
    metrics, tensors = _trained(recipe_with(tmp_path, *CASES[name]))
    changes = {
        "parts": ("trainer.offload={optimizer=true, reference=true}", None),
        "all": (ALL, tmp_path / "checkpoints"),
    }
    for override, folder in changes.values():
        found, offloaded = _trained(recipe_with(tmp_path, *CASES[name], override), folder)
        assert found == metrics
        assert offloaded.keys() == tensors.keys()
        for key, value in tensors.items():
            assert torch.equal(checkpoint._local(offloaded[key]), checkpoint._local(value)), key


def test_a_frozen_copy_is_kept_in_what_it_computes_in(tmp_path: Path) -> None:
    """Half the bytes of the masters beside it, and exactly their KL: 0 before the first update."""
    recipe = recipe_with(tmp_path, *FROZEN, 'model.dtype="bfloat16"')
    with one_rank(recipe) as trainer:
        assert {p.dtype for p in trainer.transformer.parameters()} == {torch.float32}
        reference = trainer._policies._reference
        assert reference is not None
        with reference.active() as frozen:
            assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16}
        policy = trainer.update(shares_of(recipe)[0]).policy
    assert policy["kl"] == policy["ratio_max_deviation"] == 0.0


def test_what_sft_cannot_offload_is_refused() -> None:
    tables = load_recipe(Path("recipes/glyphs_sft.toml"), []).model_dump(mode="json", exclude_none=True)
    tables["trainer"]["offload"] = {"optimizer": True, "reference": True}
    assert parse_recipe(tables).trainer.offload.optimizer
    tables["trainer"]["offload"] = {"parameters": True}
    with pytest.raises(ConfigError, match=r"offload\.parameters = true: .* in SFT use offload\.optimizer"):
        parse_recipe(tables)


def test_moments_of_8_bits_stay_on_the_gpu(tmp_path: Path) -> None:
    tables = base_tables(tmp_path)
    tables["trainer"] = {**tables["trainer"], "offload": {"optimizer": True}, "optimizer": {"type": "adamw_8bit"}}
    with pytest.raises(ConfigError, match=r'offload\.optimizer = true .*"adamw_8bit".* use type = "adamw"'):
        parse_recipe(tables)


def test_offload_is_a_table_of_the_trainer(tmp_path: Path) -> None:
    tables = base_tables(tmp_path)
    tables["trainer"] = {**tables["trainer"], "offload": {"optimiser": True}}
    with pytest.raises(ConfigError, match="optimiser"):
        parse_recipe(tables)
