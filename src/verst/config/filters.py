"""Which groups of a rollout are trained on, and how long it is sampled for them: tables of [rollout]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from verst.config.basis import Flag, NonNegativeInt, Number, PositiveInt, Section
from verst.config.plugins import ObjectPath
from verst.errors import ConfigError


class FilterBase(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name in metrics; unset = the type."""


class NoFilter(FilterBase):
    type: Literal["none"] = "none"
    """Drops nothing."""


class ZeroVarianceFilter(FilterBase):
    type: Literal["zero_variance"] = "zero_variance"
    """Drop groups whose samples all got the same reward: they carry no signal."""


class RewardRangeFilter(FilterBase):
    type: Literal["reward_range"] = "reward_range"
    """Drop groups whose weighted reward lies outside [low, high], or that have no finite one."""
    low: Number | None = None
    """Smallest reward that stays; unset = any."""
    high: Number | None = None
    """Largest reward that stays; unset = any."""
    of: Literal["mean", "best", "worst"] = "mean"
    """Which number of the group is judged, over its samples with finite rewards."""

    @model_validator(mode="after")
    def _is_a_range(self) -> RewardRangeFilter:
        if self.low is None and self.high is None:
            raise ConfigError("rollout.filters: reward_range without low and high drops nothing; give one of them")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigError(
                f"rollout.filters: reward_range with low = {self.low} above high = {self.high} drops all groups"
            )
        return self


class PythonFilter(FilterBase):
    type: Literal["python"] = "python"
    path: ObjectPath
    """`module:object`, or the name of an installed entry point of the group verst.filters: a function
    f(rewards, prompt, metadata) that returns True for a group that stays. rewards: name -> one value a sample, NaN where
    there is none; prompt: the text; metadata: the other columns of its row."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments of the function."""


FilterConfig = Annotated[NoFilter | ZeroVarianceFilter | RewardRangeFilter | PythonFilter, Field(discriminator="type")]


class DynamicConfig(Section):
    """Sample until rollout.num_groups groups have passed the filters."""

    enabled: Flag = False
    """Off: rollout.num_groups groups are sampled, and those that pass are trained on."""
    max_groups: PositiveInt | None = None
    """Groups begun in one rollout at most; then those that passed are trained on. Unset = four times num_groups."""
    extra: NonNegativeInt = 0
    """Groups in flight besides those that are still missing. Kept groups apart, what is left of them is cancelled."""
    staleness: NonNegativeInt = 0
    """Groups that passed and were not needed are kept while their weights are at most so many versions behind the ones
    that sample; 0 = none is kept."""


def filter_name(config: FilterBase) -> str:
    """The filter's name in metrics."""
    name: str = config.name or config.type  # type: ignore[attr-defined]
    return name


def check_filters(filters: Sequence[FilterBase], dynamic: DynamicConfig, *, num_groups: int) -> None:
    """Raises ConfigError for names that appear twice and for dynamic sampling that cannot work."""
    names = [filter_name(config) for config in filters]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"rollout.filters: {', '.join(twice)} twice; give them a `name` of their own")
    if not dynamic.enabled:
        return
    if all(isinstance(config, NoFilter) for config in filters):
        raise ConfigError(
            "rollout.dynamic.enabled = true, but rollout.filters drops nothing: use e.g. zero_variance, or switch it off"
        )
    if dynamic.max_groups is not None and dynamic.max_groups < num_groups:
        raise ConfigError(
            f"rollout.dynamic.max_groups = {dynamic.max_groups} is below rollout.num_groups = {num_groups}; leave it out "
            f"for {4 * num_groups}"
        )
