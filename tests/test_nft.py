"""DiffusionNFT: the loss against a float64 formula, the old policy's schedule, and a run that learns from x0 alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_fixtures import recipe_with
from torch import Tensor
from trainer_fixtures import LORA, largest_difference, one_rank, shares_of

from verst.algorithms.base import Follows
from verst.algorithms.nft import nft_loss
from verst.errors import ConfigError


def reference_loss(
    v: Tensor, v_old: Tensor, x_t: Tensor, x0: Tensor, t: float, advantage: float, beta: float, clip: float
) -> Tensor:
    """One pair, written from the paper in float64."""
    q = 0.5 + 0.5 * max(-1.0, min(1.0, advantage / clip))
    total = torch.zeros((), dtype=torch.float64)
    for sign, share in ((1.0, q), (-1.0, 1 - q)):
        mixed = v_old + sign * beta * (v - v_old)
        error = x_t - t * mixed - x0
        weight = max(1e-5, float(error.detach().abs().mean()))
        total = total + share * (error**2).mean() / weight
    return clip * total / beta


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("advantage", [-7.0, -1.3, 0.0, 2.2])
def test_loss_is_the_papers(beta: float, advantage: float) -> None:
    generator = torch.Generator().manual_seed(1)
    v, v_old, x_t, x0 = (torch.randn((1, 3, 4, 4), generator=generator, dtype=torch.float64) for _ in range(4))
    v.requires_grad_(True)
    t = torch.tensor([0.37], dtype=torch.float64)
    got = nft_loss(
        v, v_old, x_t, x0, t, torch.tensor([advantage], dtype=torch.float64), beta=beta, advantage_clip=5.0
    ).loss.sum()
    expected = reference_loss(v, v_old, x_t, x0, 0.37, advantage, beta, 5.0)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    (ours,) = torch.autograd.grad(got, v, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected, v)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_gradient_turns_with_the_advantage_when_policies_coincide() -> None:
    """v = v_old: the loss does not depend on the reward there, the gradient does, by the factor 2 q - 1."""
    generator = torch.Generator().manual_seed(2)
    v_old, x_t, x0 = (torch.randn((1, 8), generator=generator, dtype=torch.float64) for _ in range(3))
    t = torch.tensor([0.5], dtype=torch.float64)
    grads = []
    for advantage in (5.0, 0.0, -5.0):
        v = v_old.clone().requires_grad_(True)
        a = torch.tensor([advantage], dtype=torch.float64)
        loss = nft_loss(v, v_old, x_t, x0, t, a, beta=1.0, advantage_clip=5.0).loss.sum()
        grads.append(torch.autograd.grad(loss, v)[0])
    torch.testing.assert_close(grads[0], -grads[2])
    assert float(grads[0].abs().max()) > 1e-3
    torch.testing.assert_close(grads[1], torch.zeros_like(grads[1]), rtol=0, atol=1e-14)


def test_old_policy_schedules() -> None:
    assert [Follows(flat=0, ramp=0.001, largest=0.5).decay(n) for n in (0, 10, 1000)] == [0.0, 0.01, 0.5]
    assert [Follows(flat=75, ramp=0.0075, largest=0.999).decay(n) for n in (75, 76, 1000)] == [0.0, 0.0075, 0.999]


NFT = (
    'algorithm={type="nft", timestep_fraction=0.5, old_flat=1, old_ramp=0.25}',
    'sampling.steps={type="none"}',
    "sampling.shared_initial_noise=false",
)


@pytest.mark.parametrize("finetune", [(), (LORA,)], ids=["full", "lora"])
def test_the_old_policy_samples_and_follows_by_its_schedule(tmp_path: Path, finetune: tuple[str, ...]) -> None:
    recipe = recipe_with(tmp_path, *NFT, *finetune)
    (share,) = shares_of(recipe)
    block = share[0][0]
    assert block.sigmas["visual"].shape == (2, 2)  # half of 4 levels for each of 2 samples
    assert torch.equal(block.next_latents["visual"][0], block.next_latents["visual"][1])  # both are x0
    with one_rank(recipe) as trainer:
        start = trainer.weights()
        first = trainer.update(share)
        assert first.policy["old_distance"] == 0.0
        # Rollout 0 is flat: the old policy becomes the live one.
        live = trainer.weights()
        assert largest_difference(live, {n: v.full_tensor() for n, v in trainer.old.shadow.items()}) == 0.0
        assert largest_difference(live, start) > 0
        trainer.update(share)  # rollout 1: decay 0
        before = trainer.weights()
        trainer.update(share)  # rollout 2: decay 0.25
        after, old = trainer.weights(), trainer.old.shadow
        expected = {name: 0.25 * before[name] + 0.75 * after[name] for name in before}
        assert largest_difference(expected, {n: v.full_tensor() for n, v in old.items()}) <= 1e-6


def test_a_resumed_run_keeps_its_old_policy(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, *NFT)
    (share,) = shares_of(recipe)
    with one_rank(recipe) as trainer:
        for _ in range(3):
            trainer.update(share)
        trainer.save(tmp_path, 3)
        (tmp_path / ".partial_step_00000003").rename(tmp_path / "saved")
        trainer.update(share)
        straight = trainer.weights()
        old = {n: v.full_tensor().clone() for n, v in trainer.old.shadow.items()}
    with one_rank(recipe) as trainer:
        trainer.load(tmp_path / "saved")
        trainer.update(share)
        assert largest_difference(straight, trainer.weights()) == 0.0
        assert largest_difference(old, {n: v.full_tensor() for n, v in trainer.old.shadow.items()}) == 0.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('sampling.steps={type="all"}', "use none"),
        ("sampling.guidance_scale=4.5", "without guidance"),
        ("algorithm.kl_beta=0.1", "adapter_off needs model.finetune.type = lora"),
    ],
)
def test_what_nft_cannot_do_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_with(tmp_path, *NFT, override)
