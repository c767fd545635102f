"""events/groups.jsonl: one event for each group of a rollout, for bands over groups."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from verst.obs.events import Attribute, EventLog


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """mean, min, max and population std of the finite ones; all None where there is none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return dict.fromkeys(("mean", "min", "max", "std"))
    return {
        "mean": statistics.fmean(finite),
        "min": min(finite),
        "max": max(finite),
        "std": statistics.pstdev(finite),
    }


def add_group(
    log: EventLog,
    *,
    iteration: int,
    group: int,
    prompt: str,
    rewards: Sequence[float],
    by_reward: Mapping[str, Sequence[float]],
    dropped_by: str | None,
) -> None:
    """rewards: the weighted sum of each sample, NaN where masked; dropped_by: the filter that refused the group."""
    attributes: dict[str, Attribute] = {"iteration": iteration, "group": group, "prompt": prompt, **spread(rewards)}
    for name, values in by_reward.items():
        attributes |= {f"{name}/{key}": value for key, value in spread(values).items()}
    log.event("group", **attributes, num=len(rewards), dropped_by=dropped_by)
