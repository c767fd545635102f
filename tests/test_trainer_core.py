"""One optimizer step, whatever the loss: moving average, schedules, what is refused; and Flow-GRPO's loss itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_fixtures import recipe_with
from torch import Tensor, nn
from trainer_fixtures import largest_difference, one_rank, shares_of

from verst.algorithms.flow_grpo import policy_loss
from verst.config.sections import TrainerConfig
from verst.errors import InvariantError
from verst.trainer.core import TileLoss, Trainer


def small_net() -> nn.Linear:
    net = nn.Linear(3, 2)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
    return net


def trainer_of(net: nn.Module, *, total_steps: int = 8, **config: Any) -> Trainer:
    return Trainer({"net": net}, TrainerConfig(tile_size=1, **config), total_steps=total_steps)


def tiles_of(net: nn.Module, inputs: Tensor) -> list[Callable[[], TileLoss]]:
    """One tile a row; together the mean of the squared output."""
    return [
        lambda x=x: TileLoss(loss=net(x).square().mean() / len(inputs), sums={"rows": torch.ones(())}) for x in inputs
    ]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.named.items()}


def test_moving_average_is_the_closed_form_over_optimizer_steps() -> None:
    net = small_net()
    trainer = trainer_of(net, lr=0.1, ema_decay=0.9)
    inputs = torch.randn(8, 6, 3, generator=torch.Generator().manual_seed(0))
    history = [weights(trainer)]
    for step in range(8):
        metrics = trainer.step(tiles_of(net, inputs[step]))  # 6 accumulated tiles, one optimizer step
        assert metrics.sums == {"rows": 6.0}
        history.append(weights(trainer))
    assert trainer.num_steps == 8
    assert trainer.ema is not None
    for name, shadow in trainer.ema.shadow.items():
        expected = 0.9**8 * history[0][name].double()
        for step in range(1, 9):
            expected = expected + 0.1 * 0.9 ** (8 - step) * history[step][name].double()
        assert (history[0][name] - history[8][name]).abs().max() > 0.1
        assert (shadow.double() - expected).abs().max() < 1e-6


def test_moving_average_stands_in_only_inside_the_block() -> None:
    net = small_net()
    trainer = trainer_of(net, lr=0.1, ema_decay=0.9)
    trainer.step(tiles_of(net, torch.ones(2, 3)))
    live = weights(trainer)
    assert trainer.ema is not None
    with contextlib.suppress(RuntimeError), trainer.ema.applied(trainer.named):
        assert largest_difference(weights(trainer), trainer.ema.shadow) == 0.0
        raise RuntimeError("in the middle")
    assert largest_difference(weights(trainer), live) == 0.0


def test_accumulated_steps_are_adamw_on_the_mean() -> None:
    net, plain = small_net(), small_net()
    trainer = trainer_of(net, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1, grad_clip=0.5)
    adam = torch.optim.AdamW(plain.parameters(), lr=0.05, betas=(0.8, 0.9), weight_decay=0.1)
    for step in range(3):
        inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        metrics = trainer.step(tiles_of(net, inputs))
        adam.zero_grad()
        loss = plain(inputs).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adam.step()
        assert metrics.loss == pytest.approx(loss.item(), rel=1e-6)
        assert metrics.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    expected = {f"net.{name}": p.detach() for name, p in plain.named_parameters()}
    assert largest_difference(weights(trainer), expected) < 1e-6


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0.0]),
    ],
)
def test_learning_rate(schedule: str, expected: list[float]) -> None:
    trainer = trainer_of(small_net(), lr=2.0, schedule=schedule, warmup_steps=4)
    rates = [trainer.lr_at(step) / 2 for step in range(9)]
    assert rates == pytest.approx(expected, abs=1e-12)
    assert trainer.lr_at(20) == 2 * rates[-1]


def test_step_uses_and_reports_its_learning_rate() -> None:
    net = small_net()
    trainer = trainer_of(net, lr=0.4, schedule="linear", warmup_steps=2, total_steps=4)
    used = [trainer.step(tiles_of(net, torch.ones(1, 3))).lr for _ in range(5)]
    assert used == pytest.approx([0.2, 0.4, 0.4, 0.2, 0.0])


def broken_gradient(net: nn.Module) -> TileLoss:
    """A finite loss with an infinite gradient."""
    return TileLoss(loss=torch.sqrt((net.weight * 0).sum()))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (lambda net: TileLoss(loss=net(torch.full((3,), math.nan)).sum()), "loss = nan"),
        (lambda net: TileLoss(loss=net(torch.full((3,), math.inf)).sum() ** 2), "loss = (inf|nan)"),
        (broken_gradient, r"gradient norm = nan; non-finite gradients in net\.weight\. Nothing was updated"),
    ],
)
def test_non_finite_step_is_refused_and_nothing_updated(tile: Callable[[nn.Module], TileLoss], message: str) -> None:
    net = small_net()
    trainer = trainer_of(net, lr=0.1, ema_decay=0.9)
    trainer.step(tiles_of(net, torch.ones(2, 3)))
    before = {name: value.clone() for name, value in trainer.tensors().items()}
    with pytest.raises(InvariantError, match=rf"optimizer step 1: .*{message}"):
        trainer.step([*tiles_of(net, torch.ones(1, 3)), lambda: tile(net)])
    assert largest_difference(trainer.tensors(), before) == 0.0
    assert trainer.num_steps == 1
    trainer.step(tiles_of(net, torch.ones(2, 3)))  # a later good step is none the worse for it
    assert all(p.isfinite().all() for p in trainer.named.values())


def test_non_finite_advantage_stops_the_real_trainer(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path)
    (blocks,) = shares_of(recipe)[0]
    spoilt = [replace(blocks[0], advantages=torch.tensor([math.nan, 1.0])), *blocks[1:]]
    with one_rank(recipe) as trainer:
        before = trainer.weights()
        with pytest.raises(InvariantError, match=r"loss = nan.*non-finite gradients in transformer\."):
            trainer.update([spoilt])
        assert largest_difference(before, trainer.weights()) == 0.0


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(InvariantError, match="nothing to train"):
        trainer_of(small_net().requires_grad_(False))


def reference_loss(log_prob: np.ndarray, old: np.ndarray, advantage: np.ndarray, low: float, high: float) -> np.ndarray:
    """The clipped objective in float64, case by case instead of by max and clamp."""
    losses = []
    for new, before, a in zip(log_prob, old, advantage, strict=True):
        ratio = math.exp(new - before)
        if a >= 0:
            losses.append(-a * min(ratio, 1 + high))
        else:
            losses.append(-a * max(ratio, 1 - low))
    return np.array(losses)


def loss_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(64, generator=generator, dtype=torch.float64)
    log_prob = old + 0.3 * torch.randn(64, generator=generator, dtype=torch.float64)
    advantage = torch.randn(64, generator=generator, dtype=torch.float64)
    advantage[:4] = 0.0
    return log_prob.to(dtype), old.to(dtype), advantage.to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_policy_loss_is_the_papers(dtype: torch.dtype, tolerance: float) -> None:
    log_prob, old, advantage = loss_inputs(dtype)
    out = policy_loss(log_prob, old, advantage, clip_low=0.1, clip_high=0.2)
    expected = reference_loss(log_prob.double().numpy(), old.double().numpy(), advantage.double().numpy(), 0.1, 0.2)
    assert np.abs(out.loss.double().numpy() - expected).max() < tolerance
    ratio = np.exp(log_prob.double().numpy() - old.double().numpy())
    assert np.array_equal(out.clipped.numpy() == 1, (ratio < 0.9) | (ratio > 1.2))
    assert 5 < out.clipped.sum() < 60
    assert np.abs(out.ratio.double().numpy() - ratio).max() < 1e-6


def test_policy_loss_has_its_own_gradient() -> None:
    log_prob, old, advantage = loss_inputs(torch.float64)
    log_prob.requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda new: policy_loss(new, old, advantage, clip_low=0.1, clip_high=0.2).loss, (log_prob,)
    )
    (grad,) = torch.autograd.grad(
        policy_loss(log_prob, old, advantage, clip_low=0.1, clip_high=0.2).loss.sum(), log_prob
    )
    ratio = torch.exp(log_prob - old)
    stopped = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.9)) | (advantage == 0)
    assert torch.equal(grad == 0, stopped)
    assert torch.allclose(grad[~stopped], (-advantage * ratio)[~stopped])


def test_policy_loss_at_ratio_one() -> None:
    """Before any update the gradient is -A, whatever the clip range."""
    old = torch.tensor([0.3, -1.2, 0.0])
    log_prob = old.clone().requires_grad_(True)
    advantage = torch.tensor([1.0, -2.0, 0.0])
    out = policy_loss(log_prob, old, advantage, clip_low=1e-4, clip_high=1e-4)
    out.loss.sum().backward()
    assert out.ratio.tolist() == [1.0, 1.0, 1.0]
    assert out.clipped.tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(log_prob.grad, -advantage)
