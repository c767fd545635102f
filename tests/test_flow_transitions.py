"""Transitions, log-probs and KL against one float64 reference, and what must hold for every grid."""

from __future__ import annotations

import math
from typing import Any

import flow_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verst.flow import transitions
from verst.flow.controller import TRANSITIONS, make_transition
from verst.flow.transitions import StepDistribution

STOCHASTIC = ("sde", "cps", "dance")
sigmas_of_steps = st.tuples(st.floats(0.02, 1.0), st.floats(0.0, 0.98)).filter(lambda pair: pair[0] - pair[1] > 1e-2)
"""(sigma, next sigma) as fp32 has them."""


def tensors(seed: int, *, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 2, 4, 3)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


def made(kind: str, eta: float, x: Tensor, v: Tensor, sigma: Any, next_sigma: Any, first: float) -> StepDistribution:
    rows = [transitions.per_row(torch.as_tensor(s, dtype=x.dtype).expand(len(x)), x) for s in (sigma, next_sigma)]
    first_sigma = torch.tensor(first, dtype=x.dtype)
    return make_transition(kind, eta)(x, v, sigma=rows[0], next_sigma=rows[1], first_sigma=first_sigma)


def first_of(sigma: float) -> float:
    """sigma_1 of a grid whose steps have this sigma: only read where it is 1."""
    return 0.9 if sigma == 1 else sigma


@pytest.mark.parametrize("kind", [*STOCHASTIC, "ode"])
@settings(max_examples=40, deadline=None)
@given(steps=sigmas_of_steps, eta=st.floats(0.05, 0.95), seed=st.integers(0, 2**32))
def test_mean_and_std_are_the_papers(kind: str, steps: tuple[float, float], eta: float, seed: int) -> None:
    sigma, next_sigma = (float(torch.tensor(s, dtype=torch.float32)) for s in steps)
    if kind == "sde" and 0 < 1 - sigma < 1e-2:
        sigma = 0.99  # so close to 1 the two forms of the formula differ in fp32 by their conditioning
    x, v, _ = tensors(seed)
    mean, std = flow_reference.step(kind, eta, x, v, sigma=sigma, next_sigma=next_sigma, first_sigma=first_of(sigma))
    ours = made(kind, eta, x, v, sigma, next_sigma, first_of(sigma))
    torch.testing.assert_close(ours.mean.double(), mean, rtol=2e-6, atol=2e-5 * max(1.0, std**2 / sigma))
    assert ours.std.flatten().tolist() == pytest.approx([std] * len(x), rel=1e-5, abs=1e-7)
    exact = made(kind, eta, x.double(), v.double(), sigma, next_sigma, first_of(sigma))
    torch.testing.assert_close(exact.mean, mean, rtol=1e-12, atol=1e-12 * max(1.0, std**2 / sigma))


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=25, deadline=None)
@given(steps=sigmas_of_steps, seed=st.integers(0, 2**32))
def test_log_probs_are_float64s(kind: str, storage: torch.dtype, steps: tuple[float, float], seed: int) -> None:
    sigma, next_sigma = (float(torch.tensor(s, dtype=torch.float32)) for s in steps)
    if kind == "cps" and next_sigma < 0.02:
        next_sigma = 0.02
    x, v, noise = tensors(seed)
    mean, std = made(kind, 0.7, x, v, sigma, next_sigma, first_of(sigma))
    x_next = (mean + std * noise).to(storage).float()
    exact = flow_reference.log_prob(x_next, mean.double(), float(std.flatten()[0]))
    ours = transitions.gaussian_log_prob(x_next, mean, std)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)
    total = transitions.gaussian_log_prob(x_next, mean, std, reduction="sum")
    torch.testing.assert_close(total.double(), exact * mean[0].numel(), rtol=1e-6, atol=1e-5)
    plain = transitions.gaussian_log_prob(x_next, mean, std, no_const=True)
    torch.testing.assert_close(plain, -((x_next - mean) ** 2).flatten(1).mean(1))


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_log_prob_of_the_noise_is_the_density_before_rounding(kind: str) -> None:
    x, v, noise = tensors(5, dtype=torch.float64)
    mean, std = made(kind, 0.7, x, v, 0.7, 0.5, 0.7)
    exact = flow_reference.log_prob(mean + std * noise, mean, float(std.flatten()[0]))
    torch.testing.assert_close(transitions.noise_log_prob(noise, std), exact, rtol=1e-12, atol=1e-12)
    total = transitions.noise_log_prob(noise, std, reduction="sum")
    torch.testing.assert_close(total, exact * noise[0].numel(), rtol=1e-12, atol=1e-12)
    plain = transitions.noise_log_prob(noise, std, no_const=True)
    torch.testing.assert_close(plain, -((noise * std) ** 2).flatten(1).mean(1))


@settings(max_examples=25, deadline=None)
@given(std=st.floats(1e-3, 2.0), seed=st.integers(0, 2**32))
def test_kl_is_float64s(std: float, seed: int) -> None:
    mean, other, _ = tensors(seed)
    ours = transitions.gaussian_kl(mean, other, torch.tensor(std))
    exact = flow_reference.kl(mean.double(), other.double(), float(torch.tensor(std)))
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
    assert not transitions.gaussian_kl(mean, mean, torch.tensor(std)).any()


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@settings(max_examples=40, deadline=None)
@given(steps=sigmas_of_steps, seed=st.integers(0, 2**32))
def test_without_noise_every_transition_is_the_ode(
    kind: str, dtype: torch.dtype, bound: float, steps: tuple[float, float], seed: int
) -> None:
    x, v, _ = tensors(seed, dtype=dtype)
    first = first_of(float(torch.tensor(steps[0], dtype=dtype)))
    still = made(kind, 0.0, x, v, *steps, first)
    ode = made("ode", 0.0, x, v, *steps, first)
    assert not still.std.any()
    torch.testing.assert_close(still.mean, ode.mean, rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", STOCHASTIC)
@settings(max_examples=40, deadline=None)
@given(
    inner=st.lists(st.floats(0.01, 0.99), min_size=0, max_size=6, unique=True),
    eta=st.just(0.0) | st.floats(1e-3, 1.0),
    seed=st.integers(0, 2**32),
)
def test_everything_is_finite_from_sigma_one_to_the_last_step(
    kind: str, inner: list[float], eta: float, seed: int
) -> None:
    grid = torch.tensor([1.0, *sorted(inner, reverse=True), 0.0])
    x, v, noise = tensors(seed)
    for i in range(len(grid) - 1):
        mean, std = made(kind, eta, x, v, grid[i], grid[i + 1], float(grid[1]))
        assert mean.isfinite().all()
        assert std.isfinite().all()
        x = mean + std * noise
        log_prob = transitions.gaussian_log_prob(x, mean, std, no_const=not std.any())
        assert log_prob.isfinite().all()


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_gradients_are_finite_differences(kind: str) -> None:
    x, v, noise = tensors(3, dtype=torch.float64, shape=(2, 3, 2))
    with torch.no_grad():
        mean, std = made(kind, 0.7, x, v, 0.8, 0.6, 0.9)
        x_next = mean + std * noise

    def log_prob(v: Tensor) -> Tensor:
        return transitions.gaussian_log_prob(x_next, *made(kind, 0.7, x, v, 0.8, 0.6, 0.9))

    def divergence(v: Tensor) -> Tensor:
        return transitions.gaussian_kl(made(kind, 0.7, x, v, 0.8, 0.6, 0.9).mean, mean, std)

    moved = (v + 0.1 * noise.flip(0)).requires_grad_(True)
    assert torch.autograd.gradcheck(log_prob, (moved,), eps=1e-6, atol=1e-7)
    assert torch.autograd.gradcheck(divergence, (moved,), eps=1e-6, atol=1e-7)


def test_cps_keeps_the_total_noise() -> None:
    """Of a latent that is pure (1 - s) x0 + s e, with the true velocity: mean plus std e' has total noise s'."""
    _, _, e = tensors(0, dtype=torch.float64)
    x0 = torch.zeros_like(e)
    sigma, next_sigma = 0.8, 0.5
    mean, std = made("cps", 0.6, (1 - sigma) * x0 + sigma * e, e - x0, sigma, next_sigma, 0.9)
    kept = float((mean / e).mean())
    assert math.hypot(kept, float(std.flatten()[0])) == pytest.approx(next_sigma, rel=1e-12)


def test_the_table_of_transitions_is_the_contracts() -> None:
    assert set(TRANSITIONS) == {"sde", "cps", "dance", "ode"}
