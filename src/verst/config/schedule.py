"""When rollouts are sampled and when they are trained on: the table [schedule]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verst.config.algorithms import AlgorithmBase, ClippedRatio, GrpoGuardConfig
from verst.config.basis import NonNegativeInt, Section
from verst.errors import ConfigError


class SyncSchedule(Section):
    type: Literal["sync"] = "sync"
    """Each rollout is sampled with the newest weights; engines and trainer take turns."""

    @property
    def staleness(self) -> int:
        return 0


class AsyncSchedule(Section):
    type: Literal["async"] = "async"
    """Engines sample the next rollouts while the trainer trains."""
    staleness: NonNegativeInt = 1
    """Weight versions that a rollout is behind when it is trained on; the first ones less. 1: engines and trainer work side
    by side; 2: rewards beside both; 0 = sync."""


ScheduleConfig = Annotated[SyncSchedule | AsyncSchedule, Field(discriminator="type")]


def check_schedule(schedule: SyncSchedule | AsyncSchedule, algorithm: AlgorithmBase, *, kept_for: int) -> None:
    """Raises ConfigError where stale samples would be trained on as if they were fresh.

    kept_for: versions that groups kept by dynamic sampling may be behind.
    """
    if not (schedule.staleness or kept_for) or not isinstance(algorithm, ClippedRatio):
        return
    key, value = (
        ("schedule.staleness", schedule.staleness) if schedule.staleness else ("rollout.dynamic.staleness", kept_for)
    )
    if algorithm.old_log_probs == "recompute" and algorithm.importance_cap is None:
        raise ConfigError(
            f"{key} = {value} with algorithm.old_log_probs = recompute trains on stale samples as if they were fresh: set "
            "algorithm.importance_cap, e.g. 2.0, which weighs them"
        )
    if algorithm.old_log_probs == "rollout" and isinstance(algorithm, GrpoGuardConfig):
        raise ConfigError(
            f"{key} = {value}: {algorithm.label} compares with the policy before the update, which is not the one that made "
            'stale samples; set algorithm.old_log_probs = "recompute" and algorithm.importance_cap, e.g. 2.0'
        )
