"""Which steps of a rollout are stochastic, and so trained.

A strategy is a pure function of (run seed, rollout, group, number of steps): engines and resumed runs need no state
of it. All samples of a group share the steps. Steps are 0-based, [low, high) is the range they may lie in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from verst.errors import ConfigError
from verst.flow.noise import derive_seed

StepDraw = Callable[[int, int, int, int], tuple[int, ...]]
"""(run seed, rollout, group, num_steps) -> stochastic steps, ascending."""


def all_steps() -> StepDraw:
    """Every step."""
    return lambda seed, rollout, group, num_steps: tuple(range(num_steps))


def no_steps() -> StepDraw:
    """None: plain ODE sampling, nothing to replay."""
    return lambda seed, rollout, group, num_steps: ()


def window(*, size: int, low: int, high: int) -> StepDraw:
    """`size` consecutive steps, the first drawn per group, all inside [low, high)."""

    def draw(seed: int, rollout: int, group: int, num_steps: int) -> tuple[int, ...]:
        last = _last_start(size, low, high, num_steps)
        start = random.Random(derive_seed(seed, "window", rollout, group)).randint(low, last)
        return tuple(range(start, start + size))

    return draw


def random_subset(*, size: int, low: int, high: int) -> StepDraw:
    """`size` steps of [low, high), the same for all groups of a rollout."""

    def draw(seed: int, rollout: int, group: int, num_steps: int) -> tuple[int, ...]:
        _last_start(size, low, high, num_steps)
        rng = random.Random(derive_seed(seed, "random_subset", rollout))
        return tuple(sorted(rng.sample(range(low, high), size)))

    return draw


def sliding_window(
    *, size: int, low: int, high: int, stride: int, every: int, at_end: Literal["stay", "restart"]
) -> StepDraw:
    """MixGRPO's window (arXiv 2507.21802): it starts at `low` and moves `stride` steps on after `every` rollouts.

    From the noisy steps to the clean ones. Where it would leave [low, high) its last place is the very end; then it
    stays there, or starts at `low` again.
    """

    def draw(seed: int, rollout: int, group: int, num_steps: int) -> tuple[int, ...]:
        del seed, group
        room = _last_start(size, low, high, num_steps) - low
        places = 1 + -(-room // stride)
        moves = rollout // every
        place = moves % places if at_end == "restart" else min(moves, places - 1)
        start = low + min(place * stride, room)
        return tuple(range(start, start + size))

    return draw


def branch(*, size: int, low: int, high: int) -> StepDraw:
    """Flow-GRPO-Fast: a group follows one ODE path, and its samples part at one step, or two (`size`), drawn per group.

    The path is one only when all samples of the group start from one initial latent, which the caller sees to.
    """

    def draw(seed: int, rollout: int, group: int, num_steps: int) -> tuple[int, ...]:
        last = _last_start(size, low, high, num_steps)
        start = random.Random(derive_seed(seed, "branch", rollout, group)).randint(low, last)
        return tuple(range(start, start + size))

    return draw


def _last_start(size: int, low: int, high: int, num_steps: int) -> int:
    if high > num_steps or size > high - low:
        raise ConfigError(f"{size} steps do not fit between low = {low} and high = {high} of {num_steps} steps")
    return high - size
