"""Which steps of a rollout are stochastic, and so trained.

A strategy draws once for each GROUP (all samples of a prompt share the steps), from (run seed, rollout, group).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from verst.flow.noise import derive_seed

StepDraw = Callable[[int, int, int, int], tuple[int, ...]]
"""(run seed, rollout, group, num_steps) -> stochastic steps, ascending."""


def all_steps() -> StepDraw:
    """Every step."""
    return lambda seed, rollout, group, num_steps: tuple(range(num_steps))


def window(*, size: int, low: int, high: int) -> StepDraw:
    """`size` consecutive steps, the first drawn per group, all inside [low, high)."""

    def draw(seed: int, rollout: int, group: int, num_steps: int) -> tuple[int, ...]:
        rng = random.Random(derive_seed(seed, "window", rollout, group))
        start = rng.randint(low, min(high, num_steps) - size)
        return tuple(range(start, start + size))

    return draw


def random_subset(*, size: int, low: int, high: int) -> StepDraw:
    """`size` steps of [low, high), the same for all groups of a rollout."""

    def draw(seed: int, rollout: int, group: int, num_steps: int) -> tuple[int, ...]:
        rng = random.Random(derive_seed(seed, "random_subset", rollout))
        return tuple(sorted(rng.sample(range(low, min(high, num_steps)), size)))

    return draw


def no_steps() -> StepDraw:
    """None: plain ODE sampling."""
    return lambda seed, rollout, group, num_steps: ()
