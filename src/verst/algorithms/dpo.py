"""Diffusion-DPO (arXiv 2311.12908): a preference moves the model's error on the winner below that on the loser.

Online, the best and the worst sample of each group are one preference.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from verst.algorithms.base import OldPolicy, PairLosses, Policies, ScoredGroup, over_streams, rows_of, total
from verst.algorithms.pairs import PairBlock, Tile, noised_block
from verst.algorithms.sft import matching_error
from verst.config.algorithms import DpoConfig
from verst.config.sections import SamplingConfig
from verst.flow.noise import derive_seed
from verst.types import join_conditioning


class DpoLoss(NamedTuple):
    loss: Float[Tensor, " P"]
    """One a preference."""
    margin: Float[Tensor, " P"]
    """How much more than the reference the policy prefers the winner; positive: right."""


def dpo_loss(
    v_w: Float[Tensor, "P ..."],
    v_ref_w: Float[Tensor, "P ..."],
    target_w: Float[Tensor, "P ..."],
    v_l: Float[Tensor, "P ..."],
    v_ref_l: Float[Tensor, "P ..."],
    target_l: Float[Tensor, "P ..."],
    *,
    beta: float,
) -> DpoLoss:
    """-log sigmoid(beta m), m = -((|v_w - t_w|^2 - |v_ref_w - t_w|^2) - (|v_l - t_l|^2 - |v_ref_l - t_l|^2)), eq. 14.

    w and l: winner and loser at one noise level, with one noise. t = eps - x0; |.|^2 is the mean over elements. The
    published code halves its beta, so its 5000 is 2500 here. References bring no gradient.
    """
    winner = matching_error(v_w, target_w) - matching_error(v_ref_w, target_w).detach()
    loser = matching_error(v_l, target_l) - matching_error(v_ref_l, target_l).detach()
    margin = loser - winner
    return DpoLoss(-logsigmoid(beta * margin), margin)


class Dpo:
    """Rows 2i and 2i + 1 of a tile are winner and loser of one preference; each carries the preference's loss."""

    def __init__(self, config: DpoConfig, *, sampling: SamplingConfig, seed: int) -> None:
        del sampling
        self._config = config
        self._seed = seed
        self.old: OldPolicy = "none"

    def blocks(self, group: ScoredGroup) -> list[PairBlock]:
        """One block of best and worst of the scored samples, on shared noise; none where they are equal."""
        scored = [index for index, kept in enumerate(group.mask) if kept]
        if not scored:
            return []
        best = max(scored, key=lambda index: group.advantages[index])
        worst = min(scored, key=lambda index: group.advantages[index])
        if group.advantages[best] == group.advantages[worst]:
            return []
        samples, conditionings = zip(*(rows_of(group, index) for index in (best, worst)), strict=True)
        key = samples[0].key
        block = noised_block(
            samples,
            join_conditioning(conditionings),
            advantages=[group.advantages[best], group.advantages[worst]],
            mask=[True, True],
            fraction=self._config.timestep_fraction,
            seeds=[derive_seed(self._seed, "preference", key.rollout, key.group)] * 2,
        )
        return [block]

    def loss(self, tile: Tile, policies: Policies) -> PairLosses:
        """See Algorithm.loss."""
        velocity, reference, targets = policies.velocity(tile), policies.velocity(tile, "reference"), tile.targets()
        parts = {
            name: dpo_loss(
                v[0::2],
                reference[name][0::2],
                targets[name][0::2],
                v[1::2],
                reference[name][1::2],
                targets[name][1::2],
                beta=self._config.beta_dpo,
            )
            for name, v in velocity.items()
        }
        margin = total([part.margin.detach() for part in parts.values()])
        means = {"preference_margin": margin, "preference_accuracy": (margin > 0).float()}
        loss = over_streams(self._config, {name: part.loss for name, part in parts.items()})
        return PairLosses(
            loss=loss.repeat_interleave(2),
            means={name: value.repeat_interleave(2) for name, value in means.items()},
        )
