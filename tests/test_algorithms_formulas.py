"""The whole loss of every algorithm, and its gradient, against formulas of their own in NumPy, float64.

A formula is a function of one stream's velocities; streams add up with their weights. The gradient is that of finite
differences of the formula, in which what a paper holds fixed (`frozen`) stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from test_algorithms import DOUBLE, HALF_SOUND, LinearPolicies, drawn, tile_of

from verst.algorithms import ALGORITHMS, make_algorithm
from verst.config import sections as s

A = [1.2, -0.7, 0.4, -1.1]
SOUND = 0.5
ROLES = {"live": 12, "old": 10, "reference": 11}
Array = np.ndarray


def row_mean(x: Array) -> Array:
    return x.reshape(len(x), -1).mean(axis=1)


@dataclass
class Stream:
    """One stream of the tile, and the velocity of each role."""

    x: Array
    next_x: Array
    sigma: Array
    next_sigma: Array
    old_log_prob: Array
    v: dict[str, Array]
    frozen: Array
    """Live velocity where stopped gradients are taken."""

    def step(self, v: Array) -> tuple[Array, Array]:
        """Mean [B, 5] and std [B] of Flow-GRPO's step at eta 0.7."""
        g2 = 0.49 * self.sigma / (1 - self.sigma)
        dt = self.next_sigma - self.sigma
        to_x, to_v = 1 + g2 * dt / (2 * self.sigma), (1 + g2 * (1 - self.sigma) / (2 * self.sigma)) * dt
        return self.x * to_x[:, None] + v * to_v[:, None], np.sqrt(-g2 * dt)

    def log_prob(self, v: Array) -> Array:
        mean, std = self.step(v)
        n = std[:, None]
        return row_mean(-((self.next_x - mean) ** 2) / (2 * n**2) - np.log(n) - 0.5 * np.log(2 * np.pi))

    @property
    def target(self) -> Array:
        return (self.x - self.next_x) / self.sigma[:, None]


def clipped(ratio: Array, low: float, high: float) -> Array:
    a = np.array(A)
    return np.maximum(-a * ratio, -a * np.clip(ratio, 1 - low, 1 + high))


def transition_kl(z: Stream, *, dt: bool) -> Array:
    (mean, std), (other, _) = z.step(z.v["live"]), z.step(z.v["reference"])
    squared = std**2 if dt else std**2 / (z.sigma - z.next_sigma)
    return row_mean((mean - other) ** 2) / (2 * squared)


def flow_grpo(z: Stream) -> Array:
    ratio = np.exp(z.log_prob(z.v["live"]) - z.old_log_prob)
    return clipped(ratio, 0.2, 0.3) + 0.3 * transition_kl(z, dt=True)


def flow_grpo_recomputed(z: Stream) -> Array:
    ratio = np.exp(z.log_prob(z.v["live"]) - z.log_prob(z.v["old"]))
    return clipped(ratio, 0.02, 0.03) + 0.3 * transition_kl(z, dt=False)


def grpo_guard(z: Stream) -> Array:
    (mean, std), (old, _) = z.step(z.v["live"]), z.step(z.v["old"])
    bias = row_mean((mean - old) ** 2) / (2 * std**2)
    ratio = np.exp((z.log_prob(z.v["live"]) - z.old_log_prob + bias) * std)
    return clipped(ratio, 0.9, 5.0) / (z.sigma - z.next_sigma) + 0.3 * transition_kl(z, dt=True)


def distance(z: Stream, role: str) -> Array:
    return row_mean((z.v["live"] - z.v[role]) ** 2)


def nft(z: Stream) -> Array:
    beta, c = 0.7, 1.0
    q = np.clip(np.array(A) / c, -1, 1) / 2 + 0.5

    def error(sign: float) -> Array:
        def reconstructed(v: Array) -> Array:
            implicit = z.v["old"] + sign * beta * (v - z.v["old"])
            return z.x - z.sigma[:, None] * implicit - z.next_x

        weight = np.maximum(1e-5, row_mean(np.abs(reconstructed(z.frozen))))
        return row_mean(reconstructed(z.v["live"]) ** 2) / weight

    return c * (q * error(1.0) + (1 - q) * error(-1.0)) / beta + 0.3 * distance(z, "reference")


def awm(z: Stream) -> Array:
    def error(role: str) -> Array:
        return z.sigma * row_mean((z.v[role] - z.target) ** 2)

    ratio = np.exp(error("old") - error("live"))
    return clipped(ratio, 0.2, 0.3) + 0.2 * distance(z, "old") + 0.3 * distance(z, "reference")


def dpo(z: Stream) -> Array:
    worse = row_mean((z.v["live"] - z.target) ** 2) - row_mean((z.v["reference"] - z.target) ** 2)
    margin = worse[1::2] - worse[0::2]
    return np.repeat(np.log1p(np.exp(-0.7 * margin)), 2)


def online_sft(z: Stream) -> Array:
    return row_mean((z.v["live"] - z.target) ** 2) + 0.3 * distance(z, "reference")


KL: dict[str, Any] = {"kl_beta": 0.3, **HALF_SOUND}
TIGHT: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
CASES: dict[str, tuple[s.AlgorithmBase, Callable[[Stream], Array]]] = {
    "flow_grpo": (s.FlowGrpoConfig(**TIGHT, **KL), flow_grpo),
    "flow_grpo_recomputed": (
        s.FlowGrpoConfig(old_log_probs="recompute", clip_low=0.02, clip_high=0.03, kl_form="no_dt", **KL),
        flow_grpo_recomputed,
    ),
    "grpo_guard": (s.GrpoGuardConfig(clip_low=0.9, clip_high=5.0, **KL), grpo_guard),
    "nft": (s.NftConfig(beta=0.7, advantage_clip=1.0, **KL), nft),
    "awm": (s.AwmConfig(weighting="sigma", kl_old=0.2, **TIGHT, **KL), awm),
    "dpo": (s.DpoConfig(beta_dpo=0.7, **HALF_SOUND), dpo),
    "online_sft": (s.OnlineSftConfig(**KL), online_sft),
}


def weights_of(role: str) -> Array:
    matrix: Array = (torch.eye(5, dtype=DOUBLE) + 0.1 * drawn(5, 5, seed=ROLES[role])).numpy()
    return matrix


def formula(name: str, live: Array) -> Array:
    """[B]"""
    tile, of_stream = tile_of(A), CASES[name][1]
    total = np.zeros(len(A))
    for stream, weight in (("visual", 1.0), ("audio", SOUND)):
        x = tile.latents[stream].numpy()
        v = {role: x @ (live if role == "live" else weights_of(role)).T for role in ROLES}
        z = Stream(
            x=x,
            next_x=tile.next_latents[stream].numpy(),
            sigma=tile.sigmas[stream].numpy(),
            next_sigma=tile.next_sigmas[stream].numpy(),
            old_log_prob=tile.old_log_probs[stream].numpy(),
            v=v,
            frozen=x @ weights_of("live").T,
        )
        total += weight * of_stream(z)
    return total


def ours(name: str) -> tuple[Array, Array]:
    """[B] losses, and the gradient of their mean in the live weights [5, 5]."""
    algorithm = make_algorithm(CASES[name][0], sampling=s.SamplingConfig(), seed=0)
    weights = {role: torch.from_numpy(weights_of(role)) for role in ROLES}
    live = weights["live"].requires_grad_(True)
    loss = algorithm.loss(tile_of(A), LinearPolicies(weights)).loss
    (gradient,) = torch.autograd.grad(loss.mean(), live)
    return loss.detach().numpy(), gradient.numpy()


def test_every_algorithm_has_a_formula_here() -> None:
    assert {type(section) for section, _ in CASES.values()} == set(ALGORITHMS) - {s.PythonAlgorithm}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_formula(name: str) -> None:
    np.testing.assert_allclose(ours(name)[0], formula(name, weights_of("live")), rtol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    gradient, h = ours(name)[1], 1e-6
    expected = np.zeros((5, 5))
    for i, j in np.ndindex(5, 5):
        up, down = weights_of("live"), weights_of("live")
        up[i, j] += h
        down[i, j] -= h
        expected[i, j] = (formula(name, up) - formula(name, down)).mean() / (2 * h)
    assert np.abs(gradient).max() > 1e-3
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8 + 1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    "name", [name for name, (section, _) in CASES.items() if "kl_beta" in type(section).model_fields]
)
def test_the_kl_has_a_gradient_of_its_own(name: str) -> None:
    """Whatever else a loss has: it changes by kl_beta times the KL's."""
    found = []
    for beta in (0.0, 0.3, 0.6):
        section = CASES[name][0].model_copy(update={"kl_beta": beta})
        algorithm = make_algorithm(section, sampling=s.SamplingConfig(), seed=0)
        weights = {role: torch.from_numpy(weights_of(role)) for role in ROLES}
        live = weights["live"].requires_grad_(True)
        loss = algorithm.loss(tile_of(A), LinearPolicies(weights)).loss.mean()
        found.append(torch.autograd.grad(loss, live)[0])
    once, twice = found[1] - found[0], found[2] - found[0]
    assert float(once.norm()) > 1e-3
    torch.testing.assert_close(twice, 2 * once)
