"""Which steps are stochastic: drawn by group or rollout as named, inside the range, the same at every call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verst.config import sections as s
from verst.config.load import load_recipe
from verst.config.plan import batch_plan
from verst.config.recipe import RlRecipe
from verst.errors import ConfigError
from verst.flow import strategies
from verst.flow.strategies import StepDraw
from verst.rollout.plan import STRATEGIES, plan_rollout, step_draw
from verst.rollout.prompts import PromptSource

GRPO = Path(__file__).parent / "data" / "grpo.toml"
sized = st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 5)).map(
    lambda t: {"size": t[0], "low": t[1], "high": t[1] + t[0] + t[2]}
)
RANGED: dict[str, Callable[..., StepDraw]] = {
    "window": strategies.window,
    "random": strategies.random_subset,
    "branch": strategies.branch,
    "sliding": lambda **k: strategies.sliding_window(**k, stride=2, every=3, at_end="restart"),
}


COUNTS = ("rollout.num_groups=8", "rollout.group_size=8", "rollout.microgroup_size=8", "trainer.tile_size=8")


def recipe_with(*changes: str) -> RlRecipe:
    recipe = load_recipe(GRPO, [*COUNTS, "sampling.num_steps=10", *changes])
    assert isinstance(recipe, RlRecipe)
    return recipe


@pytest.mark.parametrize("name", RANGED)
@settings(max_examples=40, deadline=None)
@given(asked=sized, seed=st.integers(0, 2**40), rollout=st.integers(0, 10**6), group=st.integers(0, 99))
def test_steps_lie_in_the_range_and_are_the_same_again(
    name: str, asked: dict[str, int], seed: int, rollout: int, group: int
) -> None:
    steps = RANGED[name](**asked)(seed, rollout, group, 20)
    assert steps == RANGED[name](**asked)(seed, rollout, group, 20)
    assert len(set(steps)) == asked["size"]
    assert list(steps) == sorted(steps)
    assert asked["low"] <= steps[0]
    assert steps[-1] < asked["high"]
    if name != "random":
        assert steps[-1] - steps[0] == asked["size"] - 1


def starts(draw: StepDraw, *, groups: int = 60, rollouts: int = 1) -> set[tuple[int, ...]]:
    return {draw(1, r, g, 10) for g in range(groups) for r in range(rollouts)}


def test_a_window_is_drawn_for_each_group_and_a_random_subset_for_each_rollout() -> None:
    window = strategies.window(size=2, low=1, high=6)
    assert starts(window) == {(i, i + 1) for i in range(1, 5)}
    assert starts(strategies.branch(size=1, low=0, high=4)) == {(i,) for i in range(4)}
    subset = strategies.random_subset(size=2, low=0, high=4)
    assert len(starts(subset)) == 1
    assert len(starts(subset, groups=1, rollouts=80)) == 6
    assert starts(strategies.all_steps()) == {tuple(range(10))}
    assert starts(strategies.no_steps()) == {()}


@pytest.mark.parametrize(
    ("at_end", "expected"),
    [("stay", [0, 0, 2, 2, 4, 4, 5, 5, 5, 5, 5, 5]), ("restart", [0, 0, 2, 2, 4, 4, 5, 5, 0, 0, 2, 2])],
)
def test_a_sliding_window_moves_with_training(at_end: Any, expected: list[int]) -> None:
    """Two steps of range(0, 7), 2 on after every 2 rollouts: the last place is 5, whatever the stride."""
    draw = strategies.sliding_window(size=2, low=0, high=7, stride=2, every=2, at_end=at_end)
    assert [draw(0, rollout, 3, 8)[0] for rollout in range(12)] == expected
    assert draw(0, 4, 0, 8) == draw(9, 4, 5, 8) == (4, 5)


@pytest.mark.parametrize("name", RANGED)
def test_steps_that_do_not_fit_are_refused(name: str) -> None:
    for asked in ({"size": 2, "low": 0, "high": 11}, {"size": 3, "low": 2, "high": 4}):
        with pytest.raises(ConfigError, match="do not fit"):
            RANGED[name](**asked)(0, 0, 0, 10)


SECTIONS: list[tuple[str, s.Section, int]] = [
    ('{type="all"}', s.AllSteps(), 10),
    ('{type="window",size=3,high=8}', s.WindowSteps(size=3, low=0, high=8), 3),
    ('{type="random",low=2,high=8}', s.RandomSteps(size=2, low=2, high=8), 2),
    ('{type="sliding",high=9,every=4}', s.SlidingSteps(high=9, every=4), 2),
    ('{type="branch",high=6}', s.BranchSteps(size=1, high=6), 1),
]


@pytest.mark.parametrize(("text", "section", "trained"), SECTIONS)
def test_a_recipe_names_a_strategy(text: str, section: s.Section, trained: int) -> None:
    recipe = recipe_with(f"sampling.steps={text}")
    assert recipe.sampling.steps == section
    assert batch_plan(recipe).trained_steps == trained
    steps = step_draw(recipe.sampling.steps)(7, 2, 3, 10)
    assert len(steps) == trained


def test_every_strategy_of_the_recipe_has_a_draw() -> None:
    union = RlRecipe.model_fields["sampling"].annotation.model_fields["steps"].annotation  # type: ignore[union-attr]
    assert set(STRATEGIES) == set(union.__args__)  # type: ignore[union-attr]
    assert step_draw(s.NoSteps())(1, 2, 3, 4) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (['sampling.steps={type="none"}'], "none makes no step stochastic, so Flow-GRPO has nothing to train"),
        (['sampling.steps={type="branch",size=3,high=6}'], "size = 3"),
        (['sampling.steps={type="sliding",high=11}'], "sampling.steps.high = 11 is past sampling.num_steps = 10"),
        (['sampling.steps={type="branch",low=5,high=5}'], "does not fit between low = 5 and high = 5"),
        *(
            (['sampling.transition={type="cps"}', f"sampling.steps={steps}"], "no noise under the cps transition")
            for steps in (
                '{type="all"}',
                '{type="sliding",high=10}',
                '{type="branch",high=10}',
                '{type="random",high=10}',
            )
        ),
    ],
)
def test_a_strategy_that_asks_for_a_step_without_noise_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_with(*changes)


def source(tmp_path: Path) -> PromptSource:
    file = tmp_path / "prompts.txt"
    file.write_text("1\n2\n3\n")
    return PromptSource(file, seed=0, shuffle=False)


def test_a_group_shares_its_steps_and_a_branch_its_initial_noise(tmp_path: Path) -> None:
    """Two microgroups a group: both follow one prefix and part at one step."""
    recipe = recipe_with(
        "rollout.microgroup_size=4",
        "trainer.tile_size=4",
        "sampling.shared_initial_noise=false",
        'sampling.steps={type="branch",size=1,high=6}',
    )
    tasks = plan_rollout(recipe, source(tmp_path), 0)
    by_group = {group: [t.request for t in tasks if t.group == group] for group in range(8)}
    assert all(len(requests) == 2 for requests in by_group.values())
    for first, second in by_group.values():
        (step,) = first.rollout_sde_step_indices
        assert second.rollout_sde_step_indices == (step,)
        assert first.rollout_return_step_indices == (step, step + 1)
        assert first.initial_seeds == second.initial_seeds
        assert len({*first.initial_seeds, *second.initial_seeds}) == 1
        assert len({*first.seeds, *second.seeds}) == 8
        assert first.rollout_share_prefix
    assert len({requests[0].initial_seeds for requests in by_group.values()}) == 8
    window = plan_rollout(recipe_with("sampling.shared_initial_noise=false"), source(tmp_path), 0)
    assert window[0].request.initial_seeds is None
    assert not window[0].request.rollout_share_prefix
