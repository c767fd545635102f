"""Watching an RL run: looks at its samples, judges its metrics, and says what follows from them.

Everything it knows comes from the rows of metrics.jsonl and the published checkpoints, so that a resumed run judges as
the killed one did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verst.config import sections as s
from verst.config.recipe import RlRecipe, gold_names
from verst.config.watch import HELDOUT, AlarmConfig, active_alarms
from verst.obs import alarms
from verst.obs.alarms import ROLLED_BACK_TO, Alarm
from verst.obs.metrics import ITERATION, mean_of_finite
from verst.rewards import looks
from verst.rollout.pipeline import ScoredMicrogroup
from verst.rollout.plan import MicrogroupTask
from verst.types import Group, Microgroup, Scores


def _ratio_drift(config: s.RatioDriftAlarm, gold: Sequence[str]) -> Alarm:
    return alarms.Above(metric="policy/ratio_max_deviation", above=config.above)


def _clip_fraction(config: s.ClipFractionAlarm, gold: Sequence[str]) -> Alarm:
    return alarms.Above(metric="policy/clip_fraction", above=config.above)


def _kl(config: s.KlAlarm, gold: Sequence[str]) -> Alarm:
    return alarms.Above(metric="policy/kl", above=config.above)


def _zero_signal(config: s.ZeroSignalAlarm, gold: Sequence[str]) -> Alarm:
    return alarms.Above(metric="rollout/zero_variance_groups", per="rollout/groups", above=config.above)


def _masked_fraction(config: s.MaskedFractionAlarm, gold: Sequence[str]) -> Alarm:
    return alarms.Above(metric="reward/num_masked", per="rollout/samples", above=config.above)


def _non_finite(config: s.NonFiniteAlarm, gold: Sequence[str]) -> Alarm:
    return alarms.NonFinite()


def _loop_lag(config: s.LoopLagAlarm, gold: Sequence[str]) -> Alarm:
    return alarms.Above(metric="perf/loop_lag_max_s", above=config.above)


def _grad_norm(config: s.GradNormAlarm, gold: Sequence[str]) -> Alarm:
    return alarms.Spike(metric="train/grad_norm", factor=config.factor, window=config.window)


def _diversity_collapse(config: s.DiversityCollapseAlarm, gold: Sequence[str]) -> Alarm:
    return alarms.Collapse(metric="rollout/diversity", fraction=config.fraction, start=config.start)


def _reward_drop(config: s.RewardDropAlarm, gold: Sequence[str]) -> Alarm:
    return alarms.Drop(metric=config.metric, drop=config.drop, spread="reward/train_std")


def _reward_hacking(config: s.RewardHackingAlarm, gold: Sequence[str]) -> Alarm:
    return alarms.Hacking(
        gold=tuple(f"reward/gold/{name}" for name in gold),
        proxy={"heldout": HELDOUT, "train": "reward/train_mean"}[config.proxy],
        window=config.window,
        drop=config.drop,
        rise=config.rise,
    )


ALARMS: dict[type[s.Section], Callable[[Any, Sequence[str]], Alarm]] = {
    s.RatioDriftAlarm: _ratio_drift,
    s.ClipFractionAlarm: _clip_fraction,
    s.KlAlarm: _kl,
    s.ZeroSignalAlarm: _zero_signal,
    s.MaskedFractionAlarm: _masked_fraction,
    s.NonFiniteAlarm: _non_finite,
    s.LoopLagAlarm: _loop_lag,
    s.GradNormAlarm: _grad_norm,
    s.DiversityCollapseAlarm: _diversity_collapse,
    s.RewardDropAlarm: _reward_drop,
    s.RewardHackingAlarm: _reward_hacking,
}
"""Section -> the alarm, from the section and the gold rewards' names."""


@dataclass(frozen=True, kw_only=True)
class RaisedAlarm:
    type: str
    text: str
    """What is wrong, with the numbers."""
    action: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows from an iteration."""

    metrics: dict[str, float] = field(default_factory=dict)
    """To be reported with the iteration's own."""
    raised: tuple[RaisedAlarm, ...] = ()
    """Alarms that are news; one that stood already is in the metrics alone."""
    stop: str | None = None
    """Why the run should end now, after a checkpoint."""
    rollback_to: int | None = None
    """The iteration whose checkpoint is to be taken back, before a checkpoint of this one is saved."""
    is_best: bool = False
    """The best evaluation so far, which is to be saved."""


class Watch:
    """One driver's watch over its run."""

    def __init__(
        self, recipe: RlRecipe, *, score_gold: Callable[[MicrogroupTask, Microgroup], Awaitable[Scores]]
    ) -> None:
        """score_gold: the gold rewards of one microgroup."""
        self._config = recipe.watch
        self._gold = gold_names(recipe)
        self._best_metric = recipe.checkpoint.best_metric if recipe.checkpoint.keep_best else None
        self._score_gold = score_gold
        self._pictures = recipe.decodes_rollouts
        configs: Sequence[AlarmConfig] = active_alarms(
            recipe.watch, recipe.algorithm, self._gold, pictures=recipe.decodes_rollouts
        )
        self._alarms = [(config, ALARMS[type(config)](config, self._gold)) for config in configs]
        self._rows: list[alarms.Row] = []
        self._num_rollbacks = 0
        self._saved: set[int] = set()
        """Iterations that have a checkpoint and may be the best."""

    def resume(self, log: Sequence[Mapping[str, Any]], saved: Collection[int]) -> None:
        """log: rows of metrics.jsonl up to where the run goes on; saved: iterations of the published checkpoints."""
        rows = alarms.from_log(log)
        self._num_rollbacks = sum(ROLLED_BACK_TO in row for row in rows)
        self._rows = list(alarms.counted(rows))
        self._saved = set(saved)

    @property
    def lr_scale(self) -> float:
        """What the roll backs so far make of the learning rate."""
        return self._config.rollback_lr_factor**self._num_rollbacks

    @property
    def best(self) -> int | None:
        """The iteration of the best checkpoint; None where none is kept, or none can be named yet."""
        return self._best_of(self._rows, self._saved)

    def _best_of(self, rows: Sequence[alarms.Row], saved: Collection[int]) -> int | None:
        return None if self._best_metric is None else alarms.best(rows, self._best_metric, saved)

    async def observe(
        self, iteration: int, groups: Sequence[Group], scored: Sequence[ScoredMicrogroup]
    ) -> dict[str, float]:
        """Metrics of the pictures themselves, and of the gold rewards where they are due. Runs beside the update."""
        metrics = await asyncio.to_thread(look_metrics, groups) if self._pictures else {}
        every = self._config.gold_on_training_every
        if every and iteration % every == 0:
            scores = await asyncio.gather(*(self._score_gold(item.task, item.microgroup) for item in scored))
            metrics |= gold_metrics(self._gold, scores, kind="gold_train")
        return metrics

    def after(self, iteration: int, metrics: Mapping[str, float]) -> Verdict:
        """Judge an iteration that is done, evaluated if it was due. Must hear of every one, in order."""
        rows = [*self._rows, {ITERATION: iteration, **metrics}]
        standing = [
            (config, found)
            for config, alarm in self._alarms
            if (found := alarms.raised(alarm, rows, patience=config.patience))
        ]
        news = [
            RaisedAlarm(type=config.type, text=found.text, action=config.action)
            for config, found in standing
            if found.new
        ]
        stop, rollback_to = self._consequence(rows, news)
        out = {f"alarm/{config.type}": 1.0 for config, _ in standing}
        is_best = False
        if rollback_to is not None:
            self._num_rollbacks += 1
            out |= {ROLLED_BACK_TO: float(rollback_to), "watch/rollbacks": float(self._num_rollbacks)}
        else:
            is_best = self._best_of(rows, self._saved | {iteration}) == iteration
        self._rows = alarms.counted([*self._rows, {**rows[-1], **out}])
        if is_best:
            self._saved.add(iteration)
        return Verdict(metrics=out, raised=tuple(news), stop=stop, rollback_to=rollback_to, is_best=is_best)

    def _consequence(self, rows: Sequence[alarms.Row], news: Sequence[RaisedAlarm]) -> tuple[str | None, int | None]:
        """(why to stop, iteration to go back to); at most one of them."""
        rule = self._config.stop
        stop = alarms.stop_reason(rows, rule.metric, at_least=rule.at_least, no_improvement_for=rule.no_improvement_for)
        if stop is not None:
            return stop, None
        for alarm in news:
            if alarm.action == "stop":
                return f"alarm {alarm.type}: {alarm.text}", None
        back = [alarm for alarm in news if alarm.action == "rollback"]
        if not back:
            return None, None
        why = f"alarm {back[0].type}: {back[0].text}"
        if self._num_rollbacks == self._config.max_rollbacks:
            return f"{why}; rolled back {self._num_rollbacks} times already (watch.max_rollbacks)", None
        target = self._best_of(self._rows, self._saved)
        if target is None:
            return f"{why}; there is no best checkpoint to go back to", None
        return None, target


def look_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Of the pictures alone (the middle frame of a clip): how unlike those of a group are, how bright, how sharp."""
    frames = [[looks.middle_frame(sample.media.numpy()) for sample in group.samples] for group in groups]
    every = [frame for group in frames for frame in group]
    return {
        "rollout/diversity": float(np.mean([looks.diversity(group) for group in frames])),
        "rollout/brightness": float(np.mean([looks.luma(frame).mean() for frame in every])),
        "rollout/sharpness": float(np.mean([looks.sharpness(frame) for frame in every])),
    }


def gold_metrics(names: Sequence[str], scores: Sequence[Scores], *, kind: str = "gold") -> dict[str, float]:
    """Mean of each gold reward over the finite ones of these samples."""
    return {
        f"reward/{kind}/{name}": mean_of_finite([value for item in scores for value in item.by_reward[name]])
        for name in names
    }
