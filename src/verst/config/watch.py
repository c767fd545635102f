"""What is watched beside the training: gold rewards, alarms, early stop and roll back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from verst.config.algorithms import AlgorithmConfig, ClippedRatio, ClipRange, PythonAlgorithm, ReferenceKl
from verst.config.basis import NonNegativeFloat, NonNegativeInt, Number, PositiveFloat, PositiveInt, Section
from verst.config.rewards import RewardConfig
from verst.errors import ConfigError

HELDOUT = "reward/heldout"
"""Metric of the held-out samples under the trained rewards, weighted and added."""


class AlarmBase(Section):
    action: Literal["log", "stop", "rollback"] = "log"
    """Say it; or also end the run after a checkpoint; or also go back to the best checkpoint and on from there."""
    patience: PositiveInt = 1
    """Readings in a row that must be bad before it is raised: iterations, or evaluations where it reads those."""


class RatioDriftAlarm(AlarmBase):
    type: Literal["ratio_drift"] = "ratio_drift"
    """Engine and trainer do not compute the same policy."""
    above: PositiveFloat = 0.01
    """Largest policy/ratio_max_deviation."""
    patience: PositiveInt = 3
    """Iterations in a row."""


class ClipFractionAlarm(AlarmBase):
    type: Literal["clip_fraction"] = "clip_fraction"
    """Most pairs are clipped: the steps on one rollout go further than the clip range."""
    above: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.8
    """Largest policy/clip_fraction."""
    patience: PositiveInt = 5
    """Iterations in a row."""


class KlAlarm(AlarmBase):
    type: Literal["kl"] = "kl"
    """The policy is far from its reference."""
    above: PositiveFloat
    """Largest policy/kl, in the unit of the algorithm's KL."""


class ZeroSignalAlarm(AlarmBase):
    type: Literal["zero_signal"] = "zero_signal"
    """Most groups have samples of one reward only, so there is little to learn from."""
    above: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.8
    """Largest share of such groups in a rollout."""
    patience: PositiveInt = 5
    """Iterations in a row."""


class MaskedFractionAlarm(AlarmBase):
    type: Literal["masked_fraction"] = "masked_fraction"
    """Many samples have no reward."""
    above: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.1
    """Largest share of such samples in a rollout."""


class NonFiniteAlarm(AlarmBase):
    type: Literal["non_finite"] = "non_finite"
    """A metric is NaN or infinite, e.g. because every sample was masked."""


class LoopLagAlarm(AlarmBase):
    type: Literal["loop_lag"] = "loop_lag"
    """Something holds the driver's event loop, so that engines and rewards wait for it."""
    above: PositiveFloat = 1.0
    """Largest perf/loop_lag_max_s, in seconds."""
    patience: PositiveInt = 3
    """Iterations in a row."""


class GradNormAlarm(AlarmBase):
    type: Literal["grad_norm"] = "grad_norm"
    """The gradient is many times as large as it was."""
    factor: Annotated[float, Field(gt=1, strict=True)] = 10.0
    """Multiple of the median of the iterations before."""
    window: PositiveInt = 20
    """Iterations that the median is of; it is not raised before there are as many."""


class DiversityCollapseAlarm(AlarmBase):
    type: Literal["diversity_collapse"] = "diversity_collapse"
    """The samples of a group look alike."""
    fraction: Annotated[float, Field(gt=0, lt=1, strict=True)] = 0.3
    """Share of the starting value that rollout/diversity must keep."""
    start: PositiveInt = 5
    """Iterations that the starting value is the mean of."""
    patience: PositiveInt = 3
    """Iterations in a row."""


class RewardDropAlarm(AlarmBase):
    type: Literal["reward_drop"] = "reward_drop"
    """The held-out reward is far below its best reading."""
    drop: PositiveFloat | None = None
    """In units of the metric; unset = half the standard deviation of the last training rewards."""
    metric: str = HELDOUT
    """reward/heldout, reward/heldout/<name> or reward/gold/<name>."""


class RewardHackingAlarm(AlarmBase):
    type: Literal["reward_hacking"] = "reward_hacking"
    """A gold reward falls while the trained one rises: the policy learns the judge, not the task."""
    window: Annotated[int, Field(ge=3, strict=True)] = 5
    """Evaluations that straight lines are fitted to, by least squares."""
    drop: NonNegativeFloat = 0.0
    """The gold reward's line falls by more than this over the window."""
    rise: NonNegativeFloat = 0.0
    """The proxy's line rises by more than this over the window."""
    proxy: Literal["heldout", "train"] = "heldout"
    """The trained rewards on held-out samples, or on those of every iteration in the window."""


AlarmConfig = Annotated[
    RatioDriftAlarm
    | ClipFractionAlarm
    | KlAlarm
    | ZeroSignalAlarm
    | MaskedFractionAlarm
    | NonFiniteAlarm
    | LoopLagAlarm
    | GradNormAlarm
    | DiversityCollapseAlarm
    | RewardDropAlarm
    | RewardHackingAlarm,
    Field(discriminator="type"),
]

DEFAULT_ALARMS: tuple[AlarmConfig, ...] = (
    RatioDriftAlarm(),
    ZeroSignalAlarm(),
    RewardDropAlarm(),
    DiversityCollapseAlarm(),
)


class EarlyStopConfig(Section):
    """The run ends well before its last iteration: a checkpoint is saved, and the summary says why."""

    at_least: Number | None = None
    """Stop when the metric reaches this."""
    no_improvement_for: PositiveInt | None = None
    """Stop after this many evaluations in a row that were no new best."""
    metric: str = HELDOUT
    """reward/heldout, reward/heldout/<name> or reward/gold/<name>."""


class WatchConfig(Section):
    gold: tuple[RewardConfig, ...] = ()
    """Rewards that are never trained on and score the held-out samples: what the trained ones should stand for."""
    gold_on_training_every: NonNegativeInt = 0
    """Iterations between readings of the gold rewards on training samples; 0 = none."""
    alarms: tuple[AlarmConfig, ...] | None = None
    """Unset = ratio_drift, zero_signal, reward_drop and diversity_collapse where the algorithm has them; [] = none."""
    stop: EarlyStopConfig = EarlyStopConfig()
    """When the run ends before its last iteration."""
    max_rollbacks: PositiveInt = 3
    """Roll backs of one run; an alarm that asks for one more stops it."""
    rollback_lr_factor: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Each roll back multiplies the learning rate of what follows by this."""


def why_silent(
    alarm: AlarmConfig, algorithm: AlgorithmConfig, gold: Sequence[str], *, pictures: bool = True
) -> str | None:
    """Why this alarm could never be raised, and what to do; None where it could. pictures: rollouts are decoded."""
    if isinstance(alarm, DiversityCollapseAlarm) and not pictures:
        return "all rewards are of latents, so samples are never decoded and compared; take the alarm out"
    if isinstance(algorithm, PythonAlgorithm) and isinstance(alarm, RatioDriftAlarm | ClipFractionAlarm | KlAlarm):
        return None  # its loss names its metrics, which only a run shows
    if isinstance(alarm, RatioDriftAlarm) and not isinstance(algorithm, ClippedRatio):
        return f"algorithm.type = {algorithm.type} has no ratio of recorded steps; take the alarm out"
    if isinstance(alarm, ClipFractionAlarm) and not isinstance(algorithm, ClipRange):
        return f"algorithm.type = {algorithm.type} clips no ratio; take the alarm out"
    if isinstance(alarm, KlAlarm) and not isinstance(algorithm, ReferenceKl):
        return f"algorithm.type = {algorithm.type} has no KL; take the alarm out"
    if isinstance(alarm, KlAlarm) and not algorithm.needs_reference:
        return "algorithm.kl_beta = 0 holds no reference; give it a weight, or take the alarm out"
    if isinstance(alarm, RewardHackingAlarm) and not gold:
        return "there is no [[watch.gold]] reward to compare with; add one, or take the alarm out"
    return None


def active_alarms(
    watch: WatchConfig, algorithm: AlgorithmConfig, gold: Sequence[str], *, pictures: bool = True
) -> tuple[AlarmConfig, ...]:
    """The recipe's alarms, or those of the defaults that can be raised (see `why_silent`)."""
    if watch.alarms is not None:
        return watch.alarms
    return tuple(alarm for alarm in DEFAULT_ALARMS if why_silent(alarm, algorithm, gold, pictures=pictures) is None)


def check_watch(
    watch: WatchConfig,
    algorithm: AlgorithmConfig,
    *,
    trained: Sequence[str],
    gold: Sequence[str],
    best_metric: str | None,
    pictures: bool,
) -> None:
    """trained, gold: reward names. best_metric: unset where no best checkpoint is kept. Raises ConfigError."""
    _check_gold(watch, trained, gold)
    alarms = active_alarms(watch, algorithm, gold, pictures=pictures)
    types = [alarm.type for alarm in alarms]
    for index, alarm in enumerate(alarms):
        where = f"watch.alarms.{index}"
        if types.count(alarm.type) > 1:
            raise ConfigError(f"watch.alarms: type = {alarm.type} appears {types.count(alarm.type)} times; keep one")
        silent = why_silent(alarm, algorithm, gold, pictures=pictures)
        if silent:
            raise ConfigError(f"{where}.type = {alarm.type} can never be raised: {silent}")
        if alarm.action == "rollback" and best_metric is None:
            raise ConfigError(
                f"{where}.action = rollback goes back to the best checkpoint: set checkpoint.keep_best = true"
            )
        if isinstance(alarm, RewardDropAlarm):
            _check_metric(f"{where}.metric", alarm.metric, trained, gold)
    _check_metric("watch.stop.metric", watch.stop.metric, trained, gold)
    if best_metric is not None:
        _check_metric("checkpoint.best_metric", best_metric, trained, gold)


def _check_gold(watch: WatchConfig, trained: Sequence[str], gold: Sequence[str]) -> None:
    for index, (reward, name) in enumerate(zip(watch.gold, gold, strict=True)):
        where = f"watch.gold.{index}"
        if name in trained:
            raise ConfigError(
                f"{where}: {name} is trained on too; a gold reward is another judge, with a name of its own"
            )
        if list(gold).count(name) > 1:
            raise ConfigError(f"watch.gold: {name} appears twice; give them a `name` of their own")
        if reward.weight != 1.0:
            raise ConfigError(
                f"{where}.weight = {reward.weight:g}: a gold reward is never trained on; leave the key out"
            )
    if watch.gold_on_training_every and not gold:
        raise ConfigError(
            f"watch.gold_on_training_every = {watch.gold_on_training_every} needs a [[watch.gold]] reward"
        )


def _check_metric(key: str, metric: str, trained: Sequence[str], gold: Sequence[str]) -> None:
    valid = [HELDOUT, *(f"{HELDOUT}/{name}" for name in trained), *(f"reward/gold/{name}" for name in gold)]
    if metric not in valid:
        raise ConfigError(f"{key} = {metric!r} is read at no evaluation; one of: {', '.join(valid)}")
