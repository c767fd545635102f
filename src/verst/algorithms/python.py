"""An algorithm that a recipe brings along: `module:object`, or an entry point of the group `verst.algorithms`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from verst.algorithms.base import (
    Follows,
    OldPolicy,
    PairLosses,
    Policies,
    ScoredGroup,
    noised_blocks,
    recorded_blocks,
)
from verst.algorithms.pairs import PairBlock, Tile
from verst.config.algorithms import PythonAlgorithm
from verst.config.plugins import load_object
from verst.config.sections import SamplingConfig
from verst.errors import ConfigError, InvariantError

ENTRY_POINTS = "verst.algorithms"
Loss = Callable[[Tile, Policies], Any]


class Python:
    """A function `loss(tile, policies, **options)`, or a class made with the options that has `loss(tile, policies)`.

    It returns one loss a pair, [B], or PairLosses with metrics of its own.
    """

    def __init__(self, config: PythonAlgorithm, *, sampling: SamplingConfig, seed: int) -> None:
        """Imports the object. Raises ConfigError where there is none, or none of the two forms."""
        del sampling
        self._config = config
        self._seed = seed
        self._loss = _loss_of(load_object(config.path, group=ENTRY_POINTS, key="algorithm.path"), config)
        schedule = Follows(flat=config.old_flat, ramp=config.old_ramp, largest=config.old_decay)
        self.old: OldPolicy = schedule if config.old_policy == "follows" else config.old_policy

    def blocks(self, group: ScoredGroup) -> list[PairBlock]:
        """See Algorithm.blocks."""
        config, keep_all = self._config, self._config.needs_reference
        if config.pairs == "recorded":
            return recorded_blocks(group, keep_all=keep_all)
        return noised_blocks(group, keep_all=keep_all, fraction=config.timestep_fraction, seed=self._seed)

    def loss(self, tile: Tile, policies: Policies) -> PairLosses:
        """See Algorithm.loss. Raises InvariantError where the loss is not one number a pair."""
        out = self._loss(tile, policies)
        losses = PairLosses(loss=out) if isinstance(out, Tensor) else out
        if not isinstance(losses, PairLosses) or losses.loss.shape != tile.weight.shape:
            got = f"shape {tuple(losses.loss.shape)}" if isinstance(losses, PairLosses) else type(out).__name__
            raise InvariantError(
                f"algorithm.path = {self._config.path}: loss(tile, policies) must be a tensor of one loss a pair, "
                f"{tuple(tile.weight.shape)}, or PairLosses; got {got}"
            )
        return losses


def _loss_of(target: Any, config: PythonAlgorithm) -> Loss:
    if not inspect.isclass(target):
        if not callable(target):
            raise ConfigError(f"algorithm.path = {config.path} is neither a function nor a class with a method `loss`")
        return functools.partial(target, **config.options)
    make: Callable[..., Any] = target
    try:
        loss: Loss = make(**config.options).loss
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"algorithm.path = {config.path} cannot be made with options {config.options}: {error}"
        ) from error
    return loss
