"""Activation checkpointing: the same gradients to the bit, from blocks that compute their forward twice."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from family_fixtures import velocity_case
from run_fixtures import recipe_with
from torch import Tensor, nn
from trainer_fixtures import LORA, gradients, one_rank, shares_of

from verst.config import parse_recipe
from verst.errors import ConfigError
from verst.families import recognise
from verst.families.tiny import TINY
from verst.trainer.recompute import recompute_blocks
from verst.weights.lora import LoraSpec, adaptable, attach_lora

LIMITS: dict[str, Any] = {"hunyuanvideo1.5": {"max_sequence_length": 24}}
EVERY = {None: "none", 2: "selective", 1: "full"}


def run(name: str, *, every: int | None, lora: bool = False) -> tuple[dict[str, Tensor], Counter[str], list[str]]:
    """Gradients of the velocity's mean square, forwards of each repeated block, and which were chosen."""
    case = velocity_case(name, **LIMITS.get(name, {}))
    family = recognise(case["model"])
    parts = family.load(case["model"], parts=("transformer",), dtype=torch.float32, device=torch.device("cpu"))
    transformer = parts.transformer
    if lora:
        torch.manual_seed(0)
        attach_lora(transformer, LoraSpec(rank=2, alpha=4.0, targets=family.lora_targets))
    else:
        transformer.requires_grad_(True)
    chosen, forwards = [], Counter[str]()
    for number, model in enumerate(adaptable(transformer)):
        for path, block in model.named_modules():
            if type(block).__name__ in family.fsdp_blocks:
                count_calls(block, f"{number}.{path}", forwards)
        if every is not None:
            names = recompute_blocks(model, family.fsdp_blocks, every=every)
            chosen += [f"{number}.{path}" for path in names]
    velocity = family.velocity(
        transformer,
        case["latents"],
        case["sigmas"],
        case["conditioning"],
        guidance_scale=case["guidance_scale"],
    )
    torch.stack([v.pow(2).mean() for v in velocity.values()]).sum().backward()
    return {n: p.grad for n, p in transformer.named_parameters() if p.grad is not None}, forwards, chosen


def count_calls(block: nn.Module, name: str, calls: Counter[str]) -> None:
    forward = block.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return forward(*args, **kwargs)

    counted.__wrapped__ = forward  # type: ignore[attr-defined]
    block.forward = counted


@pytest.mark.parametrize("name", sorted(TINY))
def test_gradients_are_the_same_bits(name: str) -> None:
    expected, once, none = run(name, every=None)
    assert expected
    assert not none
    for every in (1, 2):
        found, forwards, chosen = run(name, every=every)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        assert forwards == {path: calls * (2 if path in chosen else 1) for path, calls in once.items()}
        assert len(chosen) == sum(-(-sum(p.startswith(f"{n}.") for p in once) // every) for n in (0, 1))


@pytest.mark.parametrize("name", ["flux1", "wan2.2-a14b"])
def test_gradients_of_an_adapter(name: str) -> None:
    """Where what goes into the first block asks for no gradient."""
    expected, _, _ = run(name, every=None, lora=True)
    found, _, _ = run(name, every=1, lora=True)
    assert any(float(value.abs().max()) > 0 for value in expected.values())
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_copy_computes_by_itself() -> None:
    """A module that was copied afterwards, as for saving in another dtype, has its own weights in its forward."""
    layer = nn.Sequential(nn.Linear(2, 2))
    recompute_blocks(layer, ("Linear",), every=1)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other[0].weight.zero_()
        other[0].bias.zero_()
    assert float(other(torch.ones(1, 2)).detach().abs().max()) == 0.0
    assert float(layer(torch.ones(1, 2)).detach().abs().max()) > 0.0


@pytest.mark.parametrize("weights", [(), (LORA, "algorithm.kl_beta=0.5")])
def test_an_update_is_the_same_bits(weights: tuple[str, ...], tmp_path: Any) -> None:
    """Through FSDP2 and a reference with the adapter off; the ratio before the update stays exactly 1."""
    found = []
    for choice in EVERY.values():
        recipe = recipe_with(tmp_path, *weights, f'trainer.activation_checkpointing="{choice}"')
        with one_rank(recipe) as trainer:
            metrics = trainer.update(shares_of(recipe)[0])
            found.append((metrics, gradients(trainer)))
    (metrics, expected), *others = found
    assert metrics.policy["ratio_max_deviation"] == 0.0
    for other, value in others:
        assert other == metrics
        assert all(torch.equal(value[name], gradient) for name, gradient in expected.items())


def test_a_number_that_nobody_reads_is_refused(tmp_path: Any) -> None:
    tables = recipe_with(tmp_path).model_dump(mode="json", exclude_none=True)
    tables["trainer"] |= {"checkpoint_every": 3, "activation_checkpointing": "full"}
    with pytest.raises(ConfigError, match=r'checkpoint_every = 3 .* "full": only selective .* "selective", or remove'):
        parse_recipe(tables)
    tables["trainer"] |= {"activation_checkpointing": "selective"}
    assert parse_recipe(tables).trainer.recompute_every == 3
