"""The arithmetic of a recipe: how many samples, pairs, tiles and processes it means. No model is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verst.config import sections as s
from verst.config.recipe import RlRecipe, reward_name


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Counts of one iteration, before any group is filtered out."""

    num_groups: int
    group_size: int
    samples: int
    microgroups: int
    trained_steps: int
    """Stochastic steps of one sample."""
    pairs: int
    """(sample, step) pairs: what the loss is a mean over."""
    optimizer_steps: int
    pairs_per_optimizer_step: int
    tiles_per_rank: int
    """Forward-backward passes of one rank in one optimizer step."""
    exact_ratio: bool
    """Trainer tiles have the engine's batch geometry, LoRA form and weights, so the ratio before an update is exactly 1."""


def batch_plan(recipe: RlRecipe) -> BatchPlan:
    rollout, trainer = recipe.rollout, recipe.trainer
    samples = rollout.num_groups * rollout.group_size
    steps = recipe.sampling.steps
    trained = recipe.sampling.num_steps
    if isinstance(steps, s.RangedSteps | s.NoSteps):
        trained = steps.size if isinstance(steps, s.RangedSteps) else 0
    if not recipe.algorithm.needs_stochastic_steps:
        trained = recipe.algorithm.num_levels(recipe.sampling.num_steps)
    pairs = rollout.num_groups * recipe.algorithm.trained_samples(rollout.group_size) * trained
    per_step = pairs // trainer.steps_per_rollout
    per_rank = per_step // trainer.data_ranks
    return BatchPlan(
        num_groups=rollout.num_groups,
        group_size=rollout.group_size,
        samples=samples,
        microgroups=samples // rollout.microgroup_size,
        trained_steps=trained,
        pairs=pairs,
        optimizer_steps=trainer.steps_per_rollout,
        pairs_per_optimizer_step=per_step,
        tiles_per_rank=-(-per_rank // trainer.tile_size),
        exact_ratio=(
            recipe.run.deterministic
            # Another's log-probs, of the noise and not of what came out, and of batches of one sample.
            and isinstance(recipe.engine, s.NativeEngine)
            and trainer.tile_size == rollout.microgroup_size
            and recipe.sync.lora != "merged_in_engine"
            and not recipe.schedule.staleness
            # A ring adds up an attention in another order, cut layers their products.
            and recipe.engine.parallel.ring == trainer.parallel.ring == trainer.parallel.tensor == 1
        ),
    )


_SLIVER = 0.001
"""GPUs that the worker of a reward asks Ray for; memory is not shared out by it."""


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    role: str
    count: int
    cpus: float
    """Ray CPUs that one of them asks for."""
    gpus: float


def process_plan(recipe: RlRecipe, *, cuda: bool = False) -> list[ProcessPlan]:
    """The processes of a run. Parsers, router and rewards ask for no whole CPU: they work while engines compute.

    A reward with device = cuda asks for a sliver of a GPU, without which Ray may hide all GPUs from its process; engine and
    trainer leave that much, so that one GPU still holds them all. Placed separately they take the rest of a GPU each.
    """
    gpu = 1.0 if cuda else 0.0
    slivers = {reward_name(r): gpu * _SLIVER if _on_gpu(r) else 0.0 for r in recipe.judges}
    sharers = 1 if isinstance(recipe.cluster.placement, s.SeparatePlacement) else 2
    share = round((gpu - sum(slivers[reward_name(r)] * r.workers for r in recipe.judges)) / sharers, 4)
    plan = [
        ProcessPlan(role="engine", count=recipe.engine.processes, cpus=0.5, gpus=share),
        ProcessPlan(role="trainer", count=recipe.trainer.ranks, cpus=0.5, gpus=share),
        ProcessPlan(role="parser", count=recipe.rollout.parsers.num, cpus=0.01, gpus=0.0),
    ]
    if recipe.engine.router.enabled:
        plan.append(ProcessPlan(role="router", count=1, cpus=0.01, gpus=0.0))
    for kind, rewards in (("reward", recipe.rewards), ("gold", recipe.watch.gold)):
        for reward in rewards:
            name = reward_name(reward)
            plan.append(
                ProcessPlan(role=f"{kind}:{name}", count=reward.workers, cpus=reward.num_cpus, gpus=slivers[name])
            )
    return plan


def lanes(recipe: RlRecipe) -> dict[str, int]:
    """How many there are of those whose work spans name: docs/tracing.md."""
    rewards = {f"reward/{reward_name(reward)}": reward.workers for reward in recipe.judges}
    return {"engine": recipe.engine.num, "parser": recipe.rollout.parsers.num, "trainer": 1, **rewards}


def num_gpus(recipe: RlRecipe) -> int:
    """GPUs that the run holds where it computes on CUDA."""
    return math.ceil(round(sum(p.gpus * p.count for p in process_plan(recipe, cuda=True)), 2))


def _on_gpu(reward: s.RewardConfig) -> bool:
    return isinstance(reward, s.ModelReward) and reward.device.startswith("cuda")
