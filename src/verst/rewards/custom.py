"""A reward that a recipe brings along: `module:object`, or the name of an entry point of the group `verst.rewards`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from verst.config.plugins import load_object
from verst.config.sections import CustomReward
from verst.errors import ConfigError
from verst.rewards.base import frames_of

ENTRY_POINTS = "verst.rewards"


class Custom:
    """A function `f(media, prompts, **options)`, or a class made with the options that has `score(media, prompts)`."""

    def __init__(self, config: CustomReward) -> None:
        """Imports the object. Raises ConfigError where there is none, or none of the two forms."""
        self.name = config.name
        self._score = _scorer(load_object(config.path, group=ENTRY_POINTS, key="rewards.path"), config)

    def score(self, media: Tensor, prompts: Sequence[str]) -> list[float]:
        """See Reward.score."""
        frames_of(media, prompts)
        return self._score(media, prompts)


def _scorer(target: Any, config: CustomReward) -> Callable[[Tensor, Sequence[str]], list[float]]:
    if inspect.isclass(target):
        score = _method(target, config)
    elif callable(target):
        score = functools.partial(target, **config.options)
    else:
        raise ConfigError(f"rewards: {config.path} is neither a function nor a class with a method `score`")
    if inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(score):
        raise ConfigError(
            f"rewards: {config.path} must be a plain function, not `async def`: a pool runs it in a process"
        )
    return score


def _method(target: Any, config: CustomReward) -> Callable[[Tensor, Sequence[str]], list[float]]:
    try:
        score: Callable[[Tensor, Sequence[str]], list[float]] = target(**config.options).score
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"rewards: {config.path} cannot be made with options {config.options}: {error}") from error
    return score
