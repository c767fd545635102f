"""Which groups of a rollout are trained on. A filter sees rewards, prompt and row, never pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from verst.config import filters as c
from verst.config.plugins import load_object
from verst.config.recipe import RlRecipe, reward_name
from verst.config.sections import Section
from verst.errors import ConfigError
from verst.types import Group

GroupRewards = Mapping[str, Sequence[float]]
"""reward name -> one value a sample of one complete group; NaN = masked; a reward that does not apply is absent."""
Keeps = Callable[[Group], bool]


def weighted_sums(rewards: GroupRewards, weights: Mapping[str, float]) -> list[float]:
    """One a sample, over the rewards of weight other than 0 that apply; NaN where one of them is, or where none applies.

    A reward that is only watched must not mask a sample: 0 * NaN is NaN.
    """
    counted = [(rewards[name], weight) for name, weight in weights.items() if weight != 0 and name in rewards]
    if not counted:
        return [math.nan] * len(next(iter(rewards.values()), ()))
    return [sum(value * weight for value, (_, weight) in zip(row, counted, strict=True)) for row in _rows(counted)]


def has_zero_variance(rewards: GroupRewards, weights: Mapping[str, float]) -> bool:
    """True where no reward of weight other than 0 tells the samples apart.

    Samples with a non-finite reward do not count, so a group with fewer than two others has no variance.
    """
    counted = [(rewards[name], weight) for name, weight in weights.items() if weight != 0 and name in rewards]
    return len({row for row in _rows(counted) if all(map(math.isfinite, row))}) < 2


def _rows(counted: Sequence[tuple[Sequence[float], float]]) -> list[tuple[float, ...]]:
    """One a sample."""
    return list(zip(*(values for values, _ in counted), strict=True))


def _none(config: c.NoFilter, weights: Mapping[str, float]) -> Keeps:
    return lambda group: True


def _zero_variance(config: c.ZeroVarianceFilter, weights: Mapping[str, float]) -> Keeps:
    return lambda group: not has_zero_variance(group.rewards(), weights)


_OF: dict[str, Callable[[Sequence[float]], float]] = {"mean": lambda v: sum(v) / len(v), "best": max, "worst": min}


def _reward_range(config: c.RewardRangeFilter, weights: Mapping[str, float]) -> Keeps:
    low = -math.inf if config.low is None else config.low
    high = math.inf if config.high is None else config.high

    def keeps(group: Group) -> bool:
        finite = [value for value in weighted_sums(group.rewards(), weights) if math.isfinite(value)]
        return bool(finite) and low <= _OF[config.of](finite) <= high

    return keeps


class FilterFunction(Protocol):
    """What a recipe brings along as a filter; options are those of its table."""

    def __call__(self, rewards: GroupRewards, prompt: str, metadata: Mapping[str, Any], /, **options: Any) -> bool:
        """True keeps a complete group.

        rewards: reward name -> one value a sample, NaN where it failed. metadata: the other columns of the prompt's row.
        """


def _python(config: c.PythonFilter, weights: Mapping[str, float]) -> Keeps:
    function: FilterFunction = load_object(config.path, group="verst.filters", key="rollout.filters.path")
    if not callable(function):
        raise ConfigError(f"rollout.filters.path = {config.path!r} is {type(function).__name__}, not a function")

    def keeps(group: Group) -> bool:
        answer = function(group.rewards(), group.prompt, group.metadata, **config.options)
        if not isinstance(answer, bool):
            raise ConfigError(
                f"rollout.filters: {config.path} answered {answer!r} for {group.prompt!r}; it must be True or False"
            )
        return answer

    return keeps


FILTERS: dict[type[Section], Callable[..., Keeps]] = {
    c.NoFilter: _none,
    c.ZeroVarianceFilter: _zero_variance,
    c.RewardRangeFilter: _reward_range,
    c.PythonFilter: _python,
}
"""Section -> what makes the filter, from the section and the rewards' weights."""


class GroupFilters:
    """The filters of a recipe, in its order: the first that drops a group is the one that is counted."""

    def __init__(self, recipe: RlRecipe) -> None:
        """Raises ConfigError for a function that cannot be imported."""
        weights = {reward_name(reward): reward.weight for reward in recipe.rewards}
        self._filters = [
            (c.filter_name(config), FILTERS[type(config)](config, weights)) for config in recipe.rollout.filters
        ]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._filters]

    def dropped_by(self, group: Group) -> str | None:
        """The name of the filter that drops the complete group; None where it stays."""
        return next((name for name, keeps in self._filters if not keeps(group)), None)
