"""Which groups of a rollout are trained on. A filter sees rewards, never pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from verst.config.sections import NoFilter, ZeroVarianceFilter

GroupRewards = Mapping[str, Sequence[float]]
"""reward name -> one value a sample of one complete group; NaN = masked; a reward that does not apply is absent."""


@dataclass(frozen=True, kw_only=True)
class FilterResult:
    keep: tuple[bool, ...]
    """One a group."""
    num_zero_variance: int
    """Groups without a signal, whether they were dropped or not."""


def has_zero_variance(rewards: GroupRewards, weights: Mapping[str, float]) -> bool:
    """True where no reward of weight other than 0 tells the samples apart.

    Samples with a non-finite reward do not count, so a group with fewer than two others has no variance.
    """
    columns = [rewards[name] for name, weight in weights.items() if weight != 0 and name in rewards]
    rows = {row for row in zip(*columns, strict=True) if all(map(math.isfinite, row))}
    return len(rows) < 2


def _keep_all(zero_variance: Sequence[bool]) -> tuple[bool, ...]:
    return (True,) * len(zero_variance)


def _keep_varied(zero_variance: Sequence[bool]) -> tuple[bool, ...]:
    return tuple(not flat for flat in zero_variance)


FILTERS: dict[str, Callable[[Sequence[bool]], tuple[bool, ...]]] = {
    "none": _keep_all,
    "zero_variance": _keep_varied,
}
"""Recipe type -> which groups stay, from whether each has no variance."""


def filter_groups(
    config: NoFilter | ZeroVarianceFilter, groups: Sequence[GroupRewards], weights: Mapping[str, float]
) -> FilterResult:
    """Which of the complete groups of a rollout are trained on; possibly none of them."""
    flat = [has_zero_variance(rewards, weights) for rewards in groups]
    return FilterResult(keep=FILTERS[config.type](flat), num_zero_variance=sum(flat))
