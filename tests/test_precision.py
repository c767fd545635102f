"""Dtypes of what is trained and of its gradients, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_fixtures import recipe_with
from torch import nn
from trainer_fixtures import (
    LORA,
    Leg,
    Outcome,
    gradients,
    largest_difference,
    more_ranks,
    one_rank,
    rank_legs,
    shares_of,
)

from verst.config.sections import TrainerConfig
from verst.errors import ConfigError, InvariantError
from verst.trainer import checkpoint
from verst.trainer.core import TileLoss, Trainer
from verst.trainer.scaler import LossScaler
from verst.trainer.whole import full

BF16, FP16 = "model.dtype=bfloat16", "model.dtype=float16"
FIRST_FACTOR = "trainer.precision={loss_scale=256.0, loss_scale_interval=1}"
NARROW = 'trainer.precision={master="forward", reduce="bfloat16"}'


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ('trainer.precision.master="forward"',),
            r'master = "forward" with model\.dtype = "float32".*use master = "float32"',
        ),
        (
            ('trainer.precision.master="forward"', FP16),
            r"with model\.dtype = \"float16\": .*underflow",
        ),
        (('trainer.precision.reduce="bfloat16"',), r'reduce = "bfloat16" with model\.dtype = "float32".*smaller dtype'),
        (('trainer.precision.reduce="bfloat16"', FP16), r'reduce = "float32"$'),
        (("trainer.precision.loss_scale=2.0", BF16), r'loss_scale = 2 with model\.dtype = "bfloat16".*remove it'),
        (("trainer.precision.loss_scale=3.0", FP16), r"loss_scale = 3 must be a power of two.*nearest: 4"),
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


def test_the_factor_moves_as_torchs() -> None:
    """Against torch.amp.GradScaler on one plain parameter: factors, skipped steps, weights."""
    overflows = [True, True, False, False, True, False, False, False, False]
    ours, theirs = nn.Linear(3, 1), nn.Linear(3, 1)
    theirs.load_state_dict(ours.state_dict())
    config = TrainerConfig(tile_size=1, lr=0.1, grad_clip=0.5)
    trainer = Trainer({"net": ours}, config, total_steps=9, scaler=LossScaler(64.0, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    adam = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.0)
    for step, overflow in enumerate(overflows):
        x = torch.randn(3, generator=torch.Generator().manual_seed(step))
        metrics = trainer.step([lambda x=x, overflow=overflow: TileLoss(loss=_loss(ours, x, overflow))])
        assert (metrics.loss_scale, metrics.grad_norm is None) == (scaler.get_scale(), overflow)
        adam.zero_grad()
        scaler.scale(_loss(theirs, x, overflow)).backward()
        scaler.unscale_(adam)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert overflow or metrics.grad_norm == pytest.approx(float(norm), rel=1e-6)
        scaler.step(adam)
        scaler.update()
        assert largest_difference(dict(ours.state_dict()), dict(theirs.state_dict())) < 1e-6
    assert trainer.num_steps == len(overflows)


def _loss(net: nn.Linear, x: torch.Tensor, overflow: bool) -> torch.Tensor:
    """Finite; with `overflow` the gradient is not, all the same."""
    loss = net(x).square().sum()
    return loss + torch.sqrt((net.weight * 0).sum()) if overflow else loss


def test_overflow_at_the_smallest_factor_ends_the_run() -> None:
    net = nn.Linear(3, 1)
    trainer = Trainer({"net": net}, TrainerConfig(tile_size=1), total_steps=9, scaler=LossScaler(2.0, 2000))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    tile = lambda: TileLoss(loss=_loss(net, torch.ones(3), True))  # noqa: E731
    assert trainer.step([tile]).grad_norm is None
    with pytest.raises(InvariantError, match=r"gradient norm = nan; non-finite gradients in net\.weight"):
        trainer.step([tile])
    assert largest_difference(dict(net.state_dict()), before) == 0.0


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    """And a run that goes on from a checkpoint behind it has the same factors and bits."""
    recipe = recipe_with(
        tmp_path, FP16, "trainer.ranks=2", 'model.fp32_modules=["norm_out"]', FIRST_FACTOR, "rollout.num_groups=1"
    )
    spoilt, good, last = (shares_of(recipe, rollout=rollout) for rollout in range(3))
    huge = [[replace(b, advantages=torch.full_like(b.advantages, 1e9)) for b in blocks] for blocks in spoilt[1]]
    folder = tmp_path / "save"
    legs = {
        "a": Leg(recipe=recipe, shares=[[spoilt[0], huge]]),
        "b": Leg(recipe=recipe, shares=[[spoilt[0], huge], good, last], save=folder),
        "c": Leg(recipe=recipe, shares=[last], load=checkpoint.step_folder(folder, 1)),
    }
    for name, leg in legs.items():
        torch.save(leg, tmp_path / f"{name}.leg")
    more_ranks(rank_legs, tmp_path)
    found: dict[str, list[Outcome]] = {
        name: [torch.load(tmp_path / f"{name}.rank{r}", weights_only=False) for r in range(2)] for name in legs
    }
    for one, two in found.values():
        assert largest_difference(one.weights, two.weights) == 0.0
        assert one.metrics == two.metrics
    skipped, straight, resumed = (outcomes[0] for outcomes in found.values())
    assert skipped.metrics.scaling == {"loss_scale": 256.0, "overflow_steps": 1.0}
    assert skipped.metrics.grad_norm is None
    assert largest_difference(skipped.before, skipped.weights) == 0.0
    # Halved by the first step and doubled by the second.
    assert straight.metrics.scaling == resumed.metrics.scaling == {"loss_scale": 256.0, "overflow_steps": 0.0}
    assert largest_difference(skipped.weights, straight.weights) > 1e-5
    assert straight.metrics == resumed.metrics
    assert largest_difference(straight.weights, resumed.weights) == 0.0
