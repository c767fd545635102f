"""A reward that a recipe brings along: `module:object`, or the name of an entry point of the group `verst.rewards`."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from verst.config.plugins import load_object
from verst.config.rewards import OwnReward, reward_name
from verst.errors import ConfigError, RewardError
from verst.rewards.base import RewardBatch, Score

ENTRY_POINTS = "verst.rewards"
_BY_NAME = ("metadata", "fps", "audio", "sample_rate")
"""Parameters that are filled when the function has them."""
_BESIDE_LATENTS = ("metadata", "fps")
"""Those of them for a reward that reads latents: its samples may not be decoded."""
_ONE_EACH = ("metadata", "audio")
"""Those of them with one value a sample."""


class Python:
    """A function `f(media, prompts, **options)`, or a class made with the options that has `score(media, prompts)`.

    Plain or `async def`. Parameters of the names in `_BY_NAME` are filled as well; one called `batch` gets the RewardBatch
    instead of all others. With `batched = false` it is called once a sample. Of a reward of latents the first argument is
    stream -> latents.
    """

    def __init__(self, config: OwnReward) -> None:
        """Imports the object. Raises ConfigError where there is none, or none that can be called like this."""
        self.name = reward_name(config)
        self._config = config
        self._function = _function(load_object(config.path, group=ENTRY_POINTS, key="rewards.path"), config)
        self._parameters = _parameters(self._function, config)
        self._is_async = inspect.iscoroutinefunction(_unwrapped(self._function))

    def score(self, batch: RewardBatch) -> Sequence[Score]:
        """See Reward.score."""
        if self._config.batched:
            return self._finished([self._call(batch)])[0]
        calls = [functools.partial(self._call, batch, row) for row in range(len(batch))]
        if self._is_async:
            return self._finished([call() for call in calls])
        return [call() for call in calls]

    def _call(self, batch: RewardBatch, row: int | None = None) -> Any:
        """What the function gives: scores, or a coroutine of them; of one sample where row is given."""
        if "batch" in self._parameters:
            return self._function(batch=batch)
        named = {name: getattr(batch, name) for name in _filled(self._config) if name in self._parameters}
        if row is not None:
            named |= {name: named[name][row] for name in _ONE_EACH if named.get(name) is not None}
        prompts = batch.prompts if row is None else batch.prompts[row]
        return self._function(self._samples(batch, row), prompts, **named)

    def _samples(self, batch: RewardBatch, row: int | None) -> Any:
        """The first argument: media, or stream -> latents; of one sample where row is given."""
        if not self._config.sees_latents:
            return batch.media if row is None else batch.media[row]
        if batch.latents is None:
            raise RewardError(f"reward {self.name} reads final latents, and the samples come without them")
        return {name: x if row is None else x[row] for name, x in batch.latents.items()}

    def _finished(self, results: list[Any]) -> list[Any]:
        if not self._is_async:
            return results

        async def all_of() -> list[Any]:
            return list(await asyncio.gather(*results))

        return asyncio.run(all_of())


def _filled(config: OwnReward) -> tuple[str, ...]:
    """Names of parameters that are filled where the function has them."""
    return _BESIDE_LATENTS if config.sees_latents else _BY_NAME


def _function(target: Any, config: OwnReward) -> Callable[..., Any]:
    """What is called with samples; the options are bound, or were given to the class."""
    if inspect.isclass(target):
        try:
            made: Any = target(**config.options)
            method: Callable[..., Any] = made.score
        except (TypeError, AttributeError) as error:
            raise ConfigError(
                f"rewards: {config.path} cannot be made with options {config.options}: {error}"
            ) from error
        return method
    if not callable(target):
        raise ConfigError(f"rewards: {config.path} is neither a function nor a class with a method `score`")
    taken = sorted({"batch", *_filled(config)} & set(config.options))
    if taken:
        raise ConfigError(f"rewards: options {taken} of {config.path} are filled by verst; call them something else")
    return functools.partial(target, **config.options)


def _parameters(function: Callable[..., Any], config: OwnReward) -> frozenset[str]:
    """Names of the function's parameters. Raises ConfigError where it cannot be called as it would be."""
    samples = "latents" if config.sees_latents else "media"
    try:
        signature = inspect.signature(function)
        names = frozenset(signature.parameters)
        if "batch" in names:
            signature.bind(batch=None)
        else:
            signature.bind(None, None, **{name: None for name in _filled(config) if name in names})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"rewards: {config.path} must be callable as f({samples}, prompts, **options): {error}; "
            "its other parameters go into rewards.options"
        ) from error
    if "batch" in names and not config.batched:
        raise ConfigError(f"rewards: {config.path} takes a batch, so batched = false does not fit; leave it out")
    return names


def _unwrapped(function: Any) -> Any:
    return function.func if isinstance(function, functools.partial) else function
