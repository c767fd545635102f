"""DiffusionNFT (arXiv 2509.16117): a reward turns the flow-matching loss towards good samples and away from bad ones.

Needs only the clean samples x0 of a rollout by any sampler: no log-probs, no stochastic steps.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from verst.algorithms.base import (
    Follows,
    OldPolicy,
    PairLosses,
    Policies,
    ScoredGroup,
    mean_square,
    noised_blocks,
    over_streams,
    total,
    velocity_kl,
)
from verst.algorithms.pairs import PairBlock, Tile
from verst.config.algorithms import NftConfig
from verst.config.sections import SamplingConfig


class NftLoss(NamedTuple):
    loss: Float[Tensor, " B"]
    """Per pair."""
    positive: Float[Tensor, " B"]
    """L+, the weighted reconstruction error of the implicit positive policy."""
    negative: Float[Tensor, " B"]
    """L-, of the implicit negative policy."""


def nft_loss(
    v: Float[Tensor, "B ..."],
    v_old: Float[Tensor, "B ..."],
    x_t: Float[Tensor, "B ..."],
    x0: Float[Tensor, "B ..."],
    t: Float[Tensor, " B"],
    advantage: Float[Tensor, " B"],
    *,
    beta: float,
    advantage_clip: float,
) -> NftLoss:
    """c (q L+ + (1 - q) L-) / beta per pair, with c = advantage_clip and q = clamp(A / c, -1, 1) / 2 + 1 / 2.

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v, x+- = x_t - t v+-, and
    L+- = mean((x+- - x0)^2) / max(1e-5, mean |x+- - x0|), the denominator in float64 and without a gradient.
    v_old comes from the policy that made x0.
    """
    rows = t.view(-1, *([1] * (x_t.ndim - 1)))
    positive = _reconstruction(x_t - rows * (beta * v + (1 - beta) * v_old), x0)
    negative = _reconstruction(x_t - rows * ((1 + beta) * v_old - beta * v), x0)
    q = (advantage / advantage_clip).clamp(-1, 1) / 2 + 0.5
    return NftLoss(advantage_clip * (q * positive + (1 - q) * negative) / beta, positive, negative)


def _reconstruction(x: Tensor, x0: Tensor) -> Tensor:
    error = x - x0
    weight = error.detach().double().abs().flatten(1).mean(dim=1).clamp(min=1e-5)
    return (error.flatten(1) ** 2).mean(dim=1) / weight.to(error.dtype)


class Nft:
    """The old policy samples, and follows the live one once a rollout."""

    def __init__(self, config: NftConfig, *, sampling: SamplingConfig, seed: int) -> None:
        del sampling
        self._config = config
        self._seed = seed
        self.old: OldPolicy = Follows(flat=config.old_flat, ramp=config.old_ramp, largest=config.old_decay)

    def blocks(self, group: ScoredGroup) -> list[PairBlock]:
        """See Algorithm.blocks."""
        config = self._config
        return noised_blocks(group, keep_all=config.kl_beta > 0, fraction=config.timestep_fraction, seed=self._seed)

    def loss(self, tile: Tile, policies: Policies) -> PairLosses:
        """See Algorithm.loss."""
        config = self._config
        velocity, old = policies.velocity(tile), policies.velocity(tile, "old")
        parts = {
            name: nft_loss(
                v,
                old[name],
                tile.latents[name],
                tile.next_latents[name],
                tile.sigmas[name],
                tile.advantages,
                beta=config.beta,
                advantage_clip=config.advantage_clip,
            )
            for name, v in velocity.items()
        }
        loss = over_streams(config, {name: part.loss for name, part in parts.items()})
        means = {
            "positive_loss": total([part.positive.detach() for part in parts.values()]),
            "negative_loss": total([part.negative.detach() for part in parts.values()]),
            "old_distance": total([mean_square(v.detach() - old[name]) for name, v in velocity.items()]),
        }
        if config.kl_beta > 0:
            kl = velocity_kl(config, tile, policies, "reference")
            loss, means["kl"] = loss + config.kl_beta * kl, kl.detach()
        return PairLosses(loss=loss, means=means)
