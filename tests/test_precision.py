"""Dtypes of what is trained and of its gradients, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_fixtures import recipe_with
from trainer_fixtures import LORA, gradients, one_rank, shares_of

from verst.errors import ConfigError
from verst.trainer import checkpoint
from verst.trainer.whole import full

BF16 = "model.dtype=bfloat16"
NARROW = 'trainer.precision={master="forward", reduce="bfloat16"}'


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ('trainer.precision.master="forward"',),
            r'master = "forward" with model\.dtype = "float32".*use master = "float32"',
        ),
        (
            ('trainer.precision.master="forward"', "model.dtype=float16"),
            r"with model\.dtype = \"float16\": .*underflow",
        ),
        (('trainer.precision.reduce="bfloat16"',), r'reduce = "bfloat16" with model\.dtype = "float32".*smaller dtype'),
        (('trainer.precision.reduce="bfloat16"', "model.dtype=float16"), r'reduce = "float32"$'),
    ],
)
def test_dtypes_that_do_not_go_together_are_refused(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_with(tmp_path, *overrides)


@pytest.mark.parametrize("finetune", ['model.finetune={type="full"}', LORA])
def test_masters_in_the_forwards_dtype(tmp_path: Path, finetune: str) -> None:
    """All but the islands and the moving average is bf16, the ratio is 1, and a resumed run goes on with the same bits."""
    recipe = recipe_with(tmp_path, BF16, NARROW, finetune, 'model.fp32_modules=["norm_out"]', "trainer.ema_decay=0.9")
    first, second = shares_of(recipe)[0], shares_of(recipe, rollout=1)[0]
    with one_rank(recipe) as trainer:
        for name, p in trainer.core.named.items():
            expected = torch.float32 if "norm_out" in name else torch.bfloat16
            assert (p.dtype, trainer.core.optimizer.state[p]["exp_avg"].dtype) == (expected, expected), name
        assert trainer.core.ema is not None
        assert {value.dtype for value in trainer.core.ema.shadow.values()} == {torch.float32}
        metrics = trainer.update(first)
        trainer.save(tmp_path, 1)
        folder = checkpoint.publish(tmp_path, 1, {}, keep=1)
        trainer.update(second)
        straight = {name: value.clone() for name, value in trainer._state().items()}
    assert metrics.policy["ratio_max_deviation"] == 0.0
    with one_rank(recipe) as trainer:
        trainer.load(folder)
        trainer.update(second)
        resumed = trainer._state()
        assert resumed.keys() == straight.keys()
        assert all(torch.equal(full(resumed[name]), full(value)) for name, value in straight.items())


def test_gradients_are_added_up_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    found = {}
    for reduce in ("bfloat16", "float32"):
        recipe = recipe_with(tmp_path, BF16, f'trainer.precision.reduce="{reduce}"', "trainer.grad_clip=1e9")
        with one_rank(recipe) as trainer:
            trainer.update(shares_of(recipe)[0])
            found[reduce] = gradients(trainer)
    assert all(torch.equal(g, g.bfloat16().float()) for g in found["bfloat16"].values())
    more_digits = [name for name, g in found["float32"].items() if not torch.equal(g, g.bfloat16().float())]
    assert len(more_digits) > len(found["float32"]) / 2
    for name, g in found["float32"].items():
        assert torch.allclose(found["bfloat16"][name], g, rtol=0.05, atol=0.05 * float(g.abs().max())), name
