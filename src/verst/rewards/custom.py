"""A reward that a recipe brings along: `module:object`, or the name of an entry point of the group `verst.rewards`."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from torch import Tensor

from verst.config.sections import CustomReward
from verst.errors import ConfigError
from verst.rewards.base import frames_of

ENTRY_POINTS = "verst.rewards"


class Custom:
    """A function `f(media, prompts, **options)`, or a class made with the options that has `score(media, prompts)`."""

    def __init__(self, config: CustomReward) -> None:
        """Imports the object. Raises ConfigError where there is none, or none of the two forms."""
        self.name = config.name
        self._score = _scorer(_load(config.path), config)

    def score(self, media: Tensor, prompts: Sequence[str]) -> list[float]:
        """See Reward.score."""
        frames_of(media, prompts)
        return self._score(media, prompts)


def _load(path: str) -> Any:
    module, colon, name = path.partition(":")
    if not colon:
        return _entry_point(path)
    folder = str(Path.cwd())
    if folder not in sys.path:
        # The `verst` command puts its own folder on the path, not the one with the user's module.
        sys.path.append(folder)
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rewards: path = {path!r} cannot be imported: {error}") from error


def _entry_point(name: str) -> Any:
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none is installed"
        raise ConfigError(
            f"rewards: path = {name!r} is neither module:object nor an entry point of the group {ENTRY_POINTS} ({known})"
        )
    return found[name].load()


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
