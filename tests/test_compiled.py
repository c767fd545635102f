"""Compiled blocks: engine and trainer run the same programs, and nothing that a backward would need piles up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from verst.config import RlRecipe, parse_recipe
from verst.errors import ConfigError
from verst.families.compiled import compile_blocks
from verst.flow.guidance import in_two_passes
from verst.loops.matrix import run_recipe, tiny_recipe
from verst.trainer.recompute import recompute_blocks
from verst.types import Conditioning, Geometry


def changed(recipe: RlRecipe, **sections: dict[str, Any]) -> RlRecipe:
    data = recipe.model_dump(mode="json", exclude_unset=True)
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    made = parse_recipe(data)
    assert isinstance(made, RlRecipe)
    return made


def test_ratio_is_one_with_compiled_blocks_and_either_side_in_a_forward_of_its_own(tmp_path: Path) -> None:
    recipe = tiny_recipe("sd3", "flow_grpo", "lora", folder=tmp_path)
    assert recipe.sampling.guidance_scale > 1
    recipe = changed(recipe, model={"compile": "aot_eager"}, sampling={"guidance_gradient": "conditional"})
    assert run_recipe(recipe, name="sd3", algorithm="flow_grpo").passed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) * scale, x.sum(dim=1)


def test_an_engines_block_asks_for_gradients_and_keeps_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    x = torch.randn(3, 4)
    with torch.no_grad():
        expected = model[0](x, 2.0)
    assert compile_blocks(model, ["Block"], backend="aot_eager", cut=True) == ["0"]
    trained, summed = model[0](x, 2.0)
    assert torch.equal(trained, expected[0])
    assert trained.requires_grad
    assert trained.grad_fn is None
    assert torch.equal(summed, expected[1])
    assert not summed.requires_grad


@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_gradients_are_the_eager_ones(recomputed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    x = torch.randn(3, 4)
    model[0](x, 0.5)[0].square().sum().backward()
    (expected,) = [model[0].linear.weight.grad]
    model.zero_grad()
    compile_blocks(model, ["Block"], backend="aot_eager")
    if recomputed:
        assert recompute_blocks(model, ["Block"], every=1) == ["0"]
    model[0](x, 0.5)[0].square().sum().backward()
    assert torch.allclose(model[0].linear.weight.grad, expected, rtol=1e-6)


def test_what_exchanges_tokens_inside_of_a_block_is_refused(tmp_path: Path) -> None:
    recipe = tiny_recipe("sd3", "flow_grpo", "lora", folder=tmp_path)
    with pytest.raises(ConfigError, match=r"model\.compile = inductor with engine\.parallel = 2: .*use off"):
        changed(recipe, model={"compile": "inductor"}, engine={"parallel": {"ulysses": 2}})


@pytest.mark.parametrize(("negative_gradient", "expected"), [(True, 3.0 * 5.0 - 2.0 * 7.0), (False, 3.0 * 5.0)])
def test_gradient_of_guidance_by_hand(negative_gradient: bool, expected: float) -> None:
    """v = u + g (c - u) with c = 5 w, u = 7 w: dv/dw = 5 g + 7 (1 - g), or 5 g where u is taken as a number."""
    w = torch.tensor(2.0, requires_grad=True)
    sides = Conditioning(
        positive={"side": torch.tensor([5.0])},
        negative={"side": torch.tensor([7.0])},
        geometry=Geometry(height=8, width=8),
    )
    v = in_two_passes(
        lambda rows: {"visual": w * rows.positive["side"]}, sides, 3.0, negative_gradient=negative_gradient
    )["visual"]
    assert v.item() == pytest.approx(2.0 * (3.0 * 5.0 - 2.0 * 7.0))
    v.sum().backward()
    assert w.grad is not None
    assert w.grad.item() == pytest.approx(expected)
