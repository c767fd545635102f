"""How a stochastic step moves, and which steps are stochastic: two unions of the sampling table."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verst.config.basis import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class SdeTransition(Section):
    type: Literal["sde"] = "sde"
    eta: NonNegativeFloat = 0.7
    """Noise level of Flow-GRPO's SDE."""


class CpsTransition(Section):
    type: Literal["cps"] = "cps"
    eta: Annotated[float, Field(ge=0.0, le=1.0, strict=True)] = 0.8
    """Noise level of coefficients-preserving sampling: std = next sigma * sin(pi eta / 2)."""


class DanceTransition(Section):
    type: Literal["dance"] = "dance"
    eta: NonNegativeFloat = 0.3
    """Constant diffusion coefficient of DanceGRPO's SDE."""


class AllSteps(Section):
    type: Literal["all"] = "all"
    """Every step."""


class NoSteps(Section):
    type: Literal["none"] = "none"
    """No step: plain ODE sampling, of which only the final latent is used."""


class RangedSteps(Section):
    """What the strategies that choose `size` steps of a range have in common."""

    size: PositiveInt = 2
    """Stochastic steps of a sample."""
    low: NonNegativeInt = 0
    """First step that may be stochastic."""
    high: PositiveInt
    """One past the last step that may be stochastic."""


class WindowSteps(RangedSteps):
    type: Literal["window"] = "window"
    """Consecutive steps; the start is drawn for each group."""


class RandomSteps(RangedSteps):
    type: Literal["random"] = "random"
    """A random subset for each rollout, the same for all of its groups."""


class SlidingSteps(RangedSteps):
    type: Literal["sliding"] = "sliding"
    """MixGRPO: consecutive steps that move from `low` to `high` as training goes on."""
    stride: PositiveInt = 1
    """Steps that the window moves at a time."""
    every: PositiveInt = 25
    """Rollouts between two moves."""
    at_end: Literal["stay", "restart"] = "stay"
    """What the window does behind its last place: stay there, or start at `low` again."""


class BranchSteps(RangedSteps):
    type: Literal["branch"] = "branch"
    """Flow-GRPO-Fast: a group follows one ODE path from one initial latent (whatever shared_initial_noise says) and
    parts at `size` steps, whose start is drawn for each group."""
    size: Annotated[int, Field(ge=1, le=2, strict=True)] = 1
    """Stochastic steps of a sample, one or two."""


TransitionConfig = Annotated[SdeTransition | CpsTransition | DanceTransition, Field(discriminator="type")]
StepsConfig = Annotated[
    AllSteps | WindowSteps | RandomSteps | SlidingSteps | BranchSteps | NoSteps, Field(discriminator="type")
]
