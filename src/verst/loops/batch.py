"""From scored groups to what each trainer rank gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verst.algorithms import make_algorithm
from verst.algorithms.advantages import Advantages, advantages
from verst.algorithms.base import ScoredGroup
from verst.algorithms.pairs import PairBlock
from verst.config.recipe import RlRecipe, reward_name
from verst.rollout.filters import GroupFilters
from verst.types import Group


@dataclass(frozen=True, kw_only=True)
class Batch:
    shares: list[list[list[PairBlock]]]
    """rank -> optimizer step -> its blocks; equal numbers of steps, none empty. No step: nothing to train.

    Ranks of one sequence get the same blocks."""
    num_pairs: int
    """Pairs that count in the loss, over all steps."""
    advantages: Advantages

    @property
    def num_steps(self) -> int:
        return len(self.shares[0])


def reward_weights(recipe: RlRecipe) -> dict[str, float]:
    return {reward_name(reward): reward.weight for reward in recipe.rewards}


def make_batch(recipe: RlRecipe, groups: Sequence[Group], dropped_by: Sequence[str | None] | None = None) -> Batch:
    """Advantages over complete groups, the algorithm's pairs of those that stay, and their share-out over optimizer
    steps and ranks.

    dropped_by: for each group the filter that drops it; unset: the recipe's filters are asked.
    """
    if dropped_by is None:
        filters = GroupFilters(recipe)
        dropped_by = [filters.dropped_by(group) for group in groups]
    weights = reward_weights(recipe)
    rewards = {name: [group.rewards().get(name) for group in groups] for name in weights}
    config = recipe.algorithm.advantage
    result = advantages(
        rewards, weights, mixture=config.mixture, std=config.std, epsilon=config.epsilon, clamp=config.clamp
    )
    algorithm = make_algorithm(recipe.algorithm, sampling=recipe.sampling, seed=recipe.run.seed)
    scored = [
        ScoredGroup(group=group, advantages=values, mask=mask)
        for group, values, mask in zip(groups, result.values, result.mask, strict=True)
    ]
    kept = [i for i, name in enumerate(dropped_by) if name is None]
    steps = [
        blocks
        for part in _split(kept, recipe.trainer.steps_per_rollout)
        if (blocks := [b for i in part for b in algorithm.blocks(scored[i])])
    ]
    trainer = recipe.trainer
    parts = [trainer.data_rank(rank) for rank in range(trainer.ranks)]
    return Batch(
        shares=[[blocks[part :: trainer.data_ranks] or [blocks[0].masked()] for blocks in steps] for part in parts],
        num_pairs=sum(block.num_pairs for blocks in steps for block in blocks),
        advantages=result,
    )


def _split(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """In order, sizes differing by at most one."""
    size, extra = divmod(len(items), parts)
    edges = [i * size + min(i, extra) for i in range(parts + 1)]
    return [items[edges[i] : edges[i + 1]] for i in range(parts)]
