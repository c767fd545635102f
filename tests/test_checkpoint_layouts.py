"""A run that goes on with other ranks is the same run: one, two and four of them, in every layout."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from run_fixtures import recipe_with
from trainer_fixtures import (
    CALM_ADAM,
    LORA,
    Leg,
    Outcome,
    groups_of,
    largest_difference,
    more_ranks,
    one_rank,
    rank_legs,
    run_leg,
)

from verst.loops.batch import make_batch
from verst.trainer import checkpoint
from verst.types import Group

EMA = "trainer.ema_decay=0.9"
PARALLEL = "trainer.parallel."
LAYOUTS: dict[str, tuple[str, ...]] = {
    "fsdp_lora": ("trainer.ranks=2", LORA),
    "hsdp": ("trainer.ranks=2", f"{PARALLEL}replicate=2"),
    "ulysses": ("trainer.ranks=2", f"{PARALLEL}ulysses=2"),
    "ring": ("trainer.ranks=2", f"{PARALLEL}ring=2"),
    "tensor_lora": ("trainer.ranks=2", f"{PARALLEL}tensor=2", LORA),
}
"""Two ranks; the first in the name of the run on one rank decides whether it is a LoRA's."""
FOUR = {
    "hsdp_of_ulysses": ("ulysses", ("trainer.ranks=4", f"{PARALLEL}replicate=2", f"{PARALLEL}ulysses=2")),
    "fsdp_of_ring": ("ring", ("trainer.ranks=4", f"{PARALLEL}shard=2", f"{PARALLEL}ring=2")),
    "fsdp_of_tensor": ("hsdp", ("trainer.ranks=4", f"{PARALLEL}shard=2", f"{PARALLEL}tensor=2")),
}
"""Four ranks: whose checkpoint of two they go on from, and their layout."""
BOUND = 1e-6


@functools.cache
def groups(folder: Path) -> list[list[Group]]:
    """Of three rollouts, the same for all layouts."""
    recipe = recipe_with(folder)
    return [groups_of(recipe, rollout=rollout) for rollout in range(3)]


def leg(folder: Path, overrides: tuple[str, ...], rollouts: range, **paths: Path) -> Leg:
    recipe = recipe_with(folder, EMA, CALM_ADAM, *overrides)
    return Leg(recipe=recipe, shares=[make_batch(recipe, groups(folder)[r]).shares for r in rollouts], **paths)


def step_1(root: Path) -> Path:
    return root / "step_00000001"


def alone_of(name: str) -> str:
    return "alone_lora" if "lora" in name else "alone"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """Run -> what each of its ranks found: three rollouts undisturbed, or the last of them after loading the others.

    `NAME`: undisturbed; `NAME again`: from its own checkpoint; `NAME after alone`, `alone after NAME`: from another's.
    """
    folder = tmp_path_factory.mktemp("layouts")
    found: dict[str, list[Outcome]] = {}

    def alone(name: str, leg: Leg) -> None:
        with one_rank(leg.recipe) as trainer:
            found[name] = [run_leg(trainer, leg, 0)]

    for name, overrides in (("alone", ()), ("alone_lora", (LORA,))):
        alone(name, leg(folder, overrides, range(3), save=folder / name))
    beside: dict[str, Leg] = {}
    for name, overrides in LAYOUTS.items():
        beside[name] = leg(folder, overrides, range(3), save=folder / name)
        beside[f"{name} again"] = leg(folder, overrides, range(2, 3), load=step_1(folder / name))
        beside[f"{name} after alone"] = leg(folder, overrides, range(2, 3), load=step_1(folder / alone_of(name)))
    for name, (before, overrides) in FOUR.items():
        beside[name] = leg(folder, overrides, range(2, 3), load=step_1(folder / before))
    for index, (name, leg_) in enumerate(beside.items()):
        torch.save(leg_, folder / f"{index:02} {name}.leg")
    more_ranks(rank_legs, folder, number=4)
    for index, (name, leg_) in enumerate(beside.items()):
        ranks = range(leg_.recipe.trainer.ranks)
        found[name] = [torch.load(folder / f"{index:02} {name}.rank{r}", weights_only=False) for r in ranks]
    for name in LAYOUTS:
        checkpoint.read_state(step_1(folder / name))
        overrides = (LORA,) if "lora" in name else ()
        alone(f"alone after {name}", leg(folder, overrides, range(2, 3), load=step_1(folder / name)))
    return found


def check(outcomes: list[Outcome], expected: Outcome, *, bound: float) -> None:
    for outcome in outcomes:
        assert outcome.num_steps == 3
        assert largest_difference(outcome.weights, expected.weights) <= bound
        assert largest_difference(outcome.gradients, expected.gradients) <= bound
        assert outcome.metrics.loss == pytest.approx(expected.metrics.loss, abs=bound)
        assert outcome.metrics.grad_norm == pytest.approx(expected.metrics.grad_norm, rel=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_three_rollouts_of_two_ranks_are_one_ranks(found: dict[str, list[Outcome]], name: str) -> None:
    (expected,) = found[alone_of(name)]
    check(found[name], expected, bound=BOUND)
    assert largest_difference(expected.before, expected.weights) > 1e-4


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_layout_goes_on_with_the_same_bits(found: dict[str, list[Outcome]], name: str) -> None:
    for again, straight in zip(found[f"{name} again"], found[name], strict=True):
        assert largest_difference(again.weights, straight.weights) == 0.0
        assert largest_difference(again.gradients, straight.gradients) == 0.0
        assert again.metrics == straight.metrics


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_goes_on_with_the_run_of_another(found: dict[str, list[Outcome]], name: str) -> None:
    (expected,) = found[alone_of(name)]
    for run in (f"{name} after alone", f"alone after {name}"):
        check(found[run], expected, bound=BOUND)
    # Resharding moves bits, and changes none.
    (theirs,) = found[f"alone after {name}"]
    for again, ours in zip(found[f"{name} again"], found[f"{name} after alone"], strict=True):
        assert largest_difference(again.before, theirs.before) == 0.0
        assert largest_difference(ours.before, theirs.before) <= BOUND


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_go_on_with_the_run_of_two(found: dict[str, list[Outcome]], name: str) -> None:
    check(found[name], found["alone"][0], bound=BOUND)
    (theirs,) = found[f"alone after {FOUR[name][0]}"]
    assert all(largest_difference(outcome.before, theirs.before) == 0.0 for outcome in found[name])
