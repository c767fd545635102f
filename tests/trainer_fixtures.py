"""What the tests of trainer and checkpoints share: a real rollout without processes, one rank here, more beside.

python trainer_fixtures.py JOB RANK FOLDER     one of them; JOB is a function below
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_fixtures import leave_and_exit, run_ranks
from run_fixtures import tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from verst.algorithms.pairs import PairBlock
from verst.config.recipe import RlRecipe
from verst.engine.resolve import resolve
from verst.engine.wire import encode_response, to_microgroup
from verst.engine.worker import Worker
from verst.loops.batch import make_batch
from verst.rollout.pipeline import ScoredMicrogroup, assemble
from verst.rollout.plan import plan_rollout
from verst.rollout.prompts import PromptSource
from verst.trainer import checkpoint
from verst.trainer.parallel import open_store
from verst.trainer.rl import DTYPES, RlTrainer, UpdateMetrics
from verst.trainer.whole import full
from verst.types import Group, SampleKey, Scores

LORA = 'model.finetune={type="lora", rank=2, alpha=4.0}'
CALM_ADAM = "trainer.adam_epsilon=1e-4"
"""With Adam's own 1e-8 a gradient that is 0 up to rounding becomes a whole step of either sign."""
Shares = list[list[PairBlock]]
"""One rank's: optimizer step -> blocks."""


def uneven_score(key: SampleKey) -> float:
    """Some reward that tells all samples apart."""
    return ((7 * key.index + 3 * key.group + 5 * key.rollout) % 11) / 11


@functools.cache
def _worker(dtype: str, fp32_modules: tuple[str, ...]) -> Worker:
    return Worker(tiny_model(), dtype=DTYPES[dtype], fp32_modules=fp32_modules)


def groups_of(
    recipe: RlRecipe,
    *,
    rollout: int = 0,
    worker: Worker | None = None,
    score: Callable[[SampleKey], float] = uneven_score,
) -> list[Group]:
    """One rollout through the real engine worker and the real wire, scored by `score`."""
    worker = worker or _worker(recipe.model.dtype, recipe.model.fp32_modules)
    source = PromptSource(recipe.prompts.train, seed=recipe.run.seed, shuffle=recipe.prompts.shuffle)
    scored = []
    for task in plan_rollout(recipe, source, rollout):
        (records,) = worker.generate([resolve(task.request, worker.components)])
        assert not isinstance(records, Exception), records
        microgroup = to_microgroup(encode_response(records), task.keys)
        scores = Scores(by_reward={"jpeg_size": tuple(score(key) for key in task.keys)})
        scored.append(ScoredMicrogroup(task=task, microgroup=microgroup, scores=scores))
    return assemble(scored, group_size=recipe.rollout.group_size)


def shares_of(recipe: RlRecipe, **rollout: Any) -> list[Shares]:
    """rank -> its share of one rollout."""
    return make_batch(recipe, groups_of(recipe, **rollout)).shares


@contextmanager
def one_rank(recipe: RlRecipe) -> Iterator[RlTrainer]:
    store = open_store("127.0.0.1", 0, rank=0, world_size=1)
    trainer = RlTrainer(recipe, rank=0, world_size=1, store=store, device=torch.device("cpu"))
    try:
        yield trainer
    finally:
        trainer.close()


def gradients(trainer: RlTrainer) -> dict[str, Tensor]:
    """Of the last step, unsharded, before clipping if the recipe's limit is large."""
    return {name: full(p.grad).clone() for name, p in trainer.core.named.items() if p.grad is not None}


def largest_difference(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def more_ranks(job: Callable[..., None], folder: Path, *, number: int = 2, timeout_s: float = 900.0) -> None:
    """Run `job(trainer_of, rank, folder)` of this file in `number` processes; what they say comes with a failure."""
    run_ranks(__file__, folder, before=[job.__name__], codes=[0] * number, timeout_s=timeout_s)


TrainerOf = Callable[[RlRecipe, str], RlTrainer]
"""(recipe, a name of its own) -> this rank's trainer among the recipe's first `trainer.ranks`."""


def rank_step(trainer_of: TrainerOf, rank: int, folder: Path) -> None:
    """For each `<name>.case`: one update of this rank's share; weights before closing go to `<name>.rank<r>`."""
    for path in sorted(folder.glob("*.case")):
        case: dict[str, Any] = torch.load(path, weights_only=False)
        trainer = trainer_of(case["recipe"], path.stem)
        metrics = trainer.update(case["shares"][rank])
        shards = {name: p.to_local().shape for name, p in trainer.core.named.items() if isinstance(p, DTensor)}
        result = {"weights": trainer.weights(), "metrics": metrics, "shards": shards}
        torch.save(result, path.with_suffix(f".rank{rank}"))
        trainer.close()


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Some rollouts of a run, on ranks of one layout."""

    recipe: RlRecipe
    shares: list[list[Shares]]
    """rollout -> rank -> its share."""
    load: Path | None = None
    """A published checkpoint to go on from."""
    save: Path | None = None
    """Where the state before the last rollout is published, as iteration 1."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank holds after a leg."""

    before: dict[str, Tensor]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """Of the last step, clipped."""
    metrics: UpdateMetrics
    num_steps: int


def run_leg(trainer: RlTrainer, leg: Leg, rank: int) -> Outcome:
    if leg.load is not None:
        trainer.load(leg.load)
    before = trainer.weights()
    for shares in leg.shares[:-1]:
        trainer.update(shares[rank])
    if leg.save is not None:
        trainer.save(leg.save, 1)
        dist.barrier()
        if rank == 0:
            checkpoint.publish(leg.save, 1, {}, keep=1)
        dist.barrier()
    metrics = trainer.update(leg.shares[-1][rank])
    return Outcome(
        before=before,
        weights=trainer.weights(),
        gradients=gradients(trainer),
        metrics=metrics,
        num_steps=trainer.core.num_steps,
    )


def rank_legs(trainer_of: TrainerOf, rank: int, folder: Path) -> None:
    """Each `<name>.leg` in order, by as many ranks as it has; what one found goes to `<name>.rank<r>`."""
    for path in sorted(folder.glob("*.leg")):
        leg: Leg = torch.load(path, weights_only=False)
        if rank >= leg.recipe.trainer.ranks:
            continue
        trainer = trainer_of(leg.recipe, path.stem)
        torch.save(run_leg(trainer, leg, rank), path.with_suffix(f".rank{rank}"))
        trainer.close()


def _trainers(rank: int, folder: Path) -> TrainerOf:
    """Trainers of this rank, one after the other; rank 0 opens each store and tells the others where."""

    def trainer_of(recipe: RlRecipe, name: str) -> RlTrainer:
        number, port = recipe.trainer.ranks, folder / f"{name}.port"
        if rank == 0:
            store = open_store("127.0.0.1", 0, rank=0, world_size=number)
            port.with_suffix(".new").write_text(str(store.port))
            port.with_suffix(".new").rename(port)
        else:
            while not port.exists():
                time.sleep(0.01)
            store = open_store("127.0.0.1", int(port.read_text()), rank=rank, world_size=number)
        return RlTrainer(recipe, rank=rank, world_size=number, store=store, device=torch.device("cpu"))

    return trainer_of


if __name__ == "__main__":
    # As the module that the tests import: the classes of what is pickled are found by its name.
    import trainer_fixtures

    rank, folder = int(sys.argv[2]), Path(sys.argv[3])
    getattr(trainer_fixtures, sys.argv[1])(_trainers(rank, folder), rank, folder)
    leave_and_exit()
