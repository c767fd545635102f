"""How long an iteration of a recipe would take, and how many of what keep each other busy: by simulation, without a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verst.config.load import load_stage_times
from verst.config.plan import batch_plan
from verst.config.recipe import Recipe, RlRecipe, reward_name
from verst.config.rewards import is_group_wise, rows_are_independent
from verst.config.stage_times import RewardStageTimes, StageTimes
from verst.errors import ConfigError
from verst.obs.measured import measure
from verst.obs.simulation import RewardStage, Run, Simulated, Stages, simulate
from verst.obs.spans import read_spans

_BUSY = 0.8
"""Of parsers and reward workers that are suggested: they are cheap, and should wait for engines rather than the reverse."""
_SAME = 1.01
"""Iterations whose times differ by no more are as good."""
_AFTER = 0.1
"""Of the time of all engines, in turns: what parsers or workers may take for what these finish last."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many there are of what."""

    engines: int
    trainer_ranks: int
    parsers: int
    workers: dict[str, int]
    """Reward -> its workers."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A number of GPUs, and what keeps them busiest."""

    gpus: int
    counts: Counts
    result: Simulated


@dataclass(frozen=True, kw_only=True)
class Simulation:
    times: StageTimes
    """What the stages take."""
    counts: Counts
    """The recipe's own."""
    result: Simulated
    """An iteration with these."""
    sizes: tuple[Size, ...]
    """One for each number of GPUs that can be used at all."""


def simulation(
    recipe: Recipe, *, run: Path | None, times: Path | Mapping[str, Any] | None, gpus: Sequence[int]
) -> Simulation:
    """run: a run folder whose spans say what stages take; times: those as tables, or a TOML with them. Raises ConfigError."""
    if not isinstance(recipe, RlRecipe):
        raise ConfigError("a simulation is of RL recipes: SFT has no rollout")
    if min(gpus, default=1) < 1:
        raise ConfigError(f"gpus {', '.join(map(str, gpus))}: they must be numbers from 1, e.g. 8 and 64")
    found = _stage_times(run, times)
    names = {reward_name(reward) for reward in recipe.rewards}
    if lacking := names - found.rewards.keys():
        known = ", ".join(sorted(found.rewards)) or "none"
        raise ConfigError(f"stage times of the rewards {', '.join(sorted(lacking))} are not known, only of: {known}")
    own = _own_counts(recipe)
    rows = [(number, counts) for number in gpus if (counts := suggested(recipe, found, number)) is not None]
    return Simulation(
        times=found,
        counts=own,
        result=simulated(recipe, found, own),
        sizes=tuple(Size(gpus=n, counts=counts, result=simulated(recipe, found, counts)) for n, counts in rows),
    )


def _stage_times(run: Path | None, times: Path | Mapping[str, Any] | None) -> StageTimes:
    if times is not None and run is None:
        return load_stage_times(times)
    if run is not None and times is None:
        return _of_run(run)
    raise ConfigError(
        "a simulation wants the times of stages: --from RUN, a run that was measured, or --times FILE, a TOML (from Python "
        "run = or times =), not both: docs/scaling.md"
    )


def simulated(recipe: RlRecipe, times: StageTimes, counts: Counts) -> Simulated:
    """The recipe with these counts."""
    rewards = {
        name: dataclasses.replace(stage, workers=counts.workers[name], **times.rewards[name].model_dump())
        for name, stage in rewards_of(recipe).items()
    }
    stages = Stages(
        engines=counts.engines,
        generate_s=(times.generate_s,),
        transfer_s=times.transfer_s,
        parsers=counts.parsers,
        parse_s=(times.parse_s,),
        rewards=rewards,
        train_s=_train_s(recipe, times, counts.trainer_ranks),
        sync_s=times.sync_s,
    )
    return simulate(dataclasses.replace(run_of(recipe), pass_rate=min(1.0, times.pass_rate)), stages)


def run_of(recipe: RlRecipe) -> Run:
    """What the recipe asks for; all groups pass."""
    rollout = recipe.rollout
    return Run(
        num_groups=rollout.num_groups,
        group_size=rollout.group_size,
        microgroup_size=rollout.microgroup_size,
        staleness=recipe.schedule.staleness,
        dynamic=rollout.dynamic.enabled,
    )


def rewards_of(recipe: RlRecipe) -> dict[str, RewardStage]:
    """Of the trained rewards, what the recipe says; they take no time."""
    return {
        reward_name(config): RewardStage(
            workers=config.workers,
            merge_size=_size_of_call(recipe, config),
            merge_wait_s=config.merge_wait_ms / 1000,
            attempts=config.attempts,
            of_group=is_group_wise(config),
        )
        for config in recipe.rewards
    }


def suggested(recipe: RlRecipe, times: StageTimes, gpus: int) -> Counts | None:
    """How to use so many GPUs; None where it cannot be.

    Synchronous: engines and trainer have all of them, in turns. Asynchronous: they are shared out so that the longer of
    rollout and training is as short as can be, and what would change nothing is left over. Parsers and workers (whose
    own GPUs are not counted) follow.
    """
    of_engine, of_sample = recipe.engine.parallel.ranks, recipe.trainer.parallel.same_samples
    if recipe.schedule.staleness:
        splits = [(e, (gpus - e * of_engine) // of_sample * of_sample) for e in range(1, gpus // of_engine + 1)]
    else:
        splits = [(gpus // of_engine, gpus // of_sample * of_sample)]
    possible = [(engines, ranks) for engines, ranks in splits if engines and ranks]
    if not possible:
        return None

    def bound(split: tuple[int, int]) -> tuple[float, int]:
        return max(_generate_s(recipe, times, split[0]) + times.sync_s, _train_s(recipe, times, split[1])), split[0]

    engines, ranks = min(possible, key=bound)
    target_s, share = _generate_s(recipe, times, engines), min(_BUSY, _AFTER * _waves(recipe, engines))
    if recipe.schedule.staleness:
        target_s, share = bound((engines, ranks))[0], _BUSY
    per_rollout = batch_plan(recipe).microgroups / min(1.0, times.pass_rate if recipe.rollout.dynamic.enabled else 1.0)

    def enough(work_s: float, most: float) -> int:
        return max(1, min(math.ceil(work_s / target_s / share), math.ceil(most)))

    workers = {}
    for config in recipe.rewards:
        name = reward_name(config)
        samples = per_rollout * recipe.rollout.microgroup_size
        size = recipe.rollout.group_size if is_group_wise(config) else _size_of_call(recipe, config)
        calls = samples / (size or recipe.rollout.microgroup_size)
        workers[name] = enough(_reward_s(times.rewards[name], samples, calls), calls)
    parsers = enough(per_rollout * times.parse_s, per_rollout)
    counts = Counts(engines=engines, trainer_ranks=ranks, parsers=parsers, workers=workers)
    return _without_idle_ranks(recipe, times, counts) if recipe.schedule.staleness else counts


def _without_idle_ranks(recipe: RlRecipe, times: StageTimes, counts: Counts) -> Counts:
    """Half the trainer ranks, and half of these, as long as iterations do not take longer."""
    step_s, of_sample = simulated(recipe, times, counts).step_s, recipe.trainer.parallel.same_samples
    while counts.trainer_ranks >= 2 * of_sample:
        half = dataclasses.replace(counts, trainer_ranks=counts.trainer_ranks // (2 * of_sample) * of_sample)
        if simulated(recipe, times, half).step_s > _SAME * step_s:
            break
        counts = half
    return counts


def _own_counts(recipe: RlRecipe) -> Counts:
    return Counts(
        engines=recipe.engine.num,
        trainer_ranks=recipe.trainer.ranks,
        parsers=recipe.rollout.parsers.num,
        workers={reward_name(reward): reward.workers for reward in recipe.rewards},
    )


def _of_run(run: Path) -> StageTimes:
    measured = measure(read_spans(run))
    rewards = {name: RewardStageTimes(**dataclasses.asdict(times)) for name, times in measured.rewards.items()}
    return StageTimes(**{**dataclasses.asdict(measured), "rewards": rewards})


def _waves(recipe: RlRecipe, engines: int) -> int:
    return math.ceil(batch_plan(recipe).microgroups / engines)


def _generate_s(recipe: RlRecipe, times: StageTimes, engines: int) -> float:
    return _waves(recipe, engines) * times.generate_s


def _train_s(recipe: RlRecipe, times: StageTimes, ranks: int) -> float:
    """By the tiles of the rank that has most."""
    plan, trainer = batch_plan(recipe), recipe.trainer
    pairs = math.ceil(plan.pairs_per_optimizer_step / (ranks // trainer.parallel.same_samples))
    return times.train_s * math.ceil(pairs / trainer.tile_size) / max(1, plan.tiles_per_rank)


def _size_of_call(recipe: RlRecipe, config: Any) -> int:
    """As the pool has it: who shares a call must not matter in a deterministic run."""
    return config.merge_size if rows_are_independent(config) or not recipe.run.deterministic else 0


def _reward_s(times: RewardStageTimes, samples: float, calls: float) -> float:
    return (samples * times.sample_s + calls * times.call_s) / (1 - times.failure_rate)
