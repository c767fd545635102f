"""From scored groups to what each trainer rank gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verst.algorithms.advantages import Advantages, advantages
from verst.config.recipe import RlRecipe, reward_name
from verst.config.sections import FlowGrpoConfig, NftConfig, Section
from verst.rollout.filters import FilterResult, filter_groups
from verst.trainer.pairs import PairBlock, noised_block, pair_block
from verst.types import Group, Microgroup


@dataclass(frozen=True, kw_only=True)
class Batch:
    shares: list[list[list[PairBlock]]]
    """rank -> optimizer step -> its blocks; equal numbers of steps, none empty. No step: nothing to train."""
    num_pairs: int
    """Pairs that count in the loss, over all steps."""
    advantages: Advantages
    filtered: FilterResult

    @property
    def num_steps(self) -> int:
        return len(self.shares[0])


def reward_weights(recipe: RlRecipe) -> dict[str, float]:
    return {reward_name(reward): reward.weight for reward in recipe.rewards}


def make_batch(recipe: RlRecipe, groups: Sequence[Group]) -> Batch:
    """Advantages over complete groups, filter, pairs, and their share-out over optimizer steps and ranks.

    A microgroup in which no sample has an advantage is left out unless a KL gives it a gradient.
    """
    weights = reward_weights(recipe)
    rewards = {name: [group.rewards()[name] for group in groups] for name in weights}
    config = recipe.algorithm.advantage
    result = advantages(
        rewards, weights, mixture=config.mixture, std=config.std, epsilon=config.epsilon, clamp=config.clamp
    )
    filtered = filter_groups(recipe.rollout.filter, [group.rewards() for group in groups], weights)
    kept = [i for i, keep in enumerate(filtered.keep) if keep]
    steps = [
        blocks
        for part in _split(kept, recipe.trainer.steps_per_rollout)
        if (blocks := [b for i in part for b in _blocks(recipe, groups[i], result, i)])
    ]
    ranks = recipe.trainer.ranks
    return Batch(
        shares=[[blocks[rank::ranks] or [blocks[0].masked()] for blocks in steps] for rank in range(ranks)],
        num_pairs=sum(block.num_pairs for blocks in steps for block in blocks),
        advantages=result,
        filtered=filtered,
    )


def _blocks(recipe: RlRecipe, group: Group, result: Advantages, index: int) -> list[PairBlock]:
    blocks, done = [], 0
    for microgroup in group.microgroups:
        rows = slice(done, done + len(microgroup.samples))
        values, mask = result.values[index][rows], result.mask[index][rows]
        done = rows.stop
        if any(mask) and (any(values) or recipe.algorithm.kl_beta > 0):
            blocks.append(PAIRS[type(recipe.algorithm)](recipe, microgroup, values, mask))
    return blocks


def _recorded_steps(
    recipe: RlRecipe, microgroup: Microgroup, values: Sequence[float], mask: Sequence[bool]
) -> PairBlock:
    return pair_block(microgroup, advantages=values, mask=mask)


def _noised_samples(
    recipe: RlRecipe, microgroup: Microgroup, values: Sequence[float], mask: Sequence[bool]
) -> PairBlock:
    assert isinstance(recipe.algorithm, NftConfig)
    fraction = recipe.algorithm.timestep_fraction
    return noised_block(microgroup, advantages=values, mask=mask, fraction=fraction, seed=recipe.run.seed)


PAIRS: dict[type[Section], Callable[[RlRecipe, Microgroup, Sequence[float], Sequence[bool]], PairBlock]] = {
    FlowGrpoConfig: _recorded_steps,
    NftConfig: _noised_samples,
}
"""Algorithm section -> how the pairs of one scored microgroup are made."""


def _split(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """In order, sizes differing by at most one."""
    size, extra = divmod(len(items), parts)
    edges = [i * size + min(i, extra) for i in range(parts + 1)]
    return [items[edges[i] : edges[i + 1]] for i in range(parts)]
