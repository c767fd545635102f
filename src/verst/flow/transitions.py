"""One denoising step as a distribution: mean and standard deviation of the next latent, its log-prob, its KL.

Pure functions in fp32 of the tensors' own shapes. `sigma` and `next_sigma` broadcast against `x`
(usually [B, 1, 1, 1]); dt = next_sigma - sigma < 0.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

LOG_SQRT_2PI = math.log(math.sqrt(2.0 * math.pi))

LogProbReduction = Literal["mean", "sum"]
"""Over the elements of one sample's latent: `mean` is what the clip ranges of the literature are made for."""


class StepDistribution(NamedTuple):
    """Gaussian of the next latent: x' = mean + std * noise."""

    mean: Tensor
    """The latent's shape, fp32."""
    std: Tensor
    """Broadcasts against mean, fp32; 0 for a deterministic step."""


@runtime_checkable
class Transition(Protocol):
    """A rule that turns (x, v, sigma, next sigma) into the distribution of the next latent."""

    def __call__(
        self, x: Tensor, v: Tensor, *, sigma: Tensor, next_sigma: Tensor, first_sigma: Tensor
    ) -> StepDistribution: ...


def sde(
    x: Float[Tensor, "*s"],
    v: Float[Tensor, "*s"],
    *,
    sigma: Float[Tensor, "*a"],
    next_sigma: Float[Tensor, "*a"],
    first_sigma: Float[Tensor, ""],
    eta: float,
) -> StepDistribution:
    """Flow-GRPO's reverse SDE (arXiv 2505.05470, eq. 9).

    g = eta sqrt(sigma / (1 - sigma*)), where sigma* = sigma, or sigma_1 (`first_sigma`) where sigma is 1 and the
    formula would divide by zero. std = g sqrt(-dt).
    """
    dt = next_sigma - sigma
    at_one = torch.isclose(sigma, torch.ones_like(sigma))
    g = eta * torch.sqrt(sigma / (1 - torch.where(at_one, first_sigma, sigma)))
    return _sde_with_diffusion(x, v, sigma, dt, g)


def dance(
    x: Float[Tensor, "*s"],
    v: Float[Tensor, "*s"],
    *,
    sigma: Float[Tensor, "*a"],
    next_sigma: Float[Tensor, "*a"],
    first_sigma: Float[Tensor, ""],
    eta: float,
) -> StepDistribution:
    """DanceGRPO's SDE: the same drift with a constant g = eta (arXiv 2505.07818)."""
    del first_sigma
    return _sde_with_diffusion(x, v, sigma, next_sigma - sigma, torch.full_like(sigma, eta))


def _sde_with_diffusion(x: Tensor, v: Tensor, sigma: Tensor, dt: Tensor, g: Tensor) -> StepDistribution:
    mean = x * (1 + g**2 / (2 * sigma) * dt) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
    return StepDistribution(mean, g * torch.sqrt(-1 * dt))


def cps(
    x: Float[Tensor, "*s"],
    v: Float[Tensor, "*s"],
    *,
    sigma: Float[Tensor, "*a"],
    next_sigma: Float[Tensor, "*a"],
    first_sigma: Float[Tensor, ""],
    eta: float,
) -> StepDistribution:
    """Coefficients-preserving sampling (arXiv 2509.05952): the total noise of x' stays next_sigma.

    std = next_sigma sin(pi eta / 2); at the last step it is 0, which has no log-prob and is never a trained step.
    """
    del first_sigma
    std = next_sigma * math.sin(eta * math.pi / 2)
    x0 = x - sigma * v
    x1 = x + (1 - sigma) * v
    return StepDistribution(x0 * (1 - next_sigma) + x1 * torch.sqrt(next_sigma**2 - std**2), std)


def ode(
    x: Float[Tensor, "*s"],
    v: Float[Tensor, "*s"],
    *,
    sigma: Float[Tensor, "*a"],
    next_sigma: Float[Tensor, "*a"],
    first_sigma: Float[Tensor, ""] | None = None,
) -> StepDistribution:
    """Euler: x + dt v, no noise."""
    del first_sigma
    return StepDistribution(x + (next_sigma - sigma) * v, torch.zeros_like(sigma))


def gaussian_log_prob(
    x_next: Float[Tensor, "B ..."],
    mean: Float[Tensor, "B ..."],
    std: Tensor,
    *,
    no_const: bool = False,
    reduction: LogProbReduction = "mean",
) -> Float[Tensor, " B"]:
    """Mean (or sum) over a sample's elements of log N(x_next; mean, std).

    `no_const` keeps only -(x_next - mean)^2, the rollout contract's switch (it is not divided by 2 std^2 there).
    """
    return _log_prob((x_next - mean) ** 2, std, no_const=no_const, reduction=reduction)


def noise_log_prob(
    noise: Float[Tensor, "B ..."], std: Tensor, *, no_const: bool = False, reduction: LogProbReduction = "mean"
) -> Float[Tensor, " B"]:
    """The same density at mean + std * noise, from the drawn noise: of the next latent BEFORE it is rounded.

    SGLang-Diffusion's log-prob. It knows neither the weights nor the storage dtype, so a trainer that only has the
    stored latents cannot reproduce it where they are rounded.
    """
    return _log_prob((noise * std) ** 2, std, no_const=no_const, reduction=reduction)


def _log_prob(squared: Tensor, std: Tensor, *, no_const: bool, reduction: LogProbReduction) -> Tensor:
    per_element = -squared
    if not no_const:
        per_element = per_element / (2 * std**2) - torch.log(std) - LOG_SQRT_2PI
    flat = per_element.flatten(1)
    return flat.mean(dim=1) if reduction == "mean" else flat.sum(dim=1)


def gaussian_kl(mean: Float[Tensor, "B ..."], mean_ref: Float[Tensor, "B ..."], std: Tensor) -> Float[Tensor, " B"]:
    """KL of two transitions with the SAME std: (mean - mean_ref)^2 / (2 std^2), mean over a sample's elements."""
    return ((mean - mean_ref) ** 2 / (2 * std**2)).flatten(1).mean(dim=1)


def per_row(sigma: Float[Tensor, " B"], x: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
    """[B] -> [B, 1, ..., 1], so that it broadcasts against x."""
    return sigma.view(-1, *([1] * (x.ndim - 1)))
