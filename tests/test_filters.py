"""Group filters: what each of them drops, by what name, and what a recipe may not say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import recipe_with

from verst.errors import ConfigError
from verst.loops.batch import make_batch
from verst.rollout.filters import GroupFilters, has_zero_variance, weighted_sums
from verst.types import Conditioning, Group, Microgroup, Sample, SampleKey, Scores

NAN = math.nan
TWO = "rewards=[{type='jpeg_size'}, {type='brightness', weight=2.0}]"


def group_of(values: Mapping[str, Sequence[float]], *, prompt: str = "a cat", **metadata: Any) -> Group:
    """A complete group with these rewards, of one microgroup."""
    count = len(next(iter(values.values())))
    samples = tuple(
        Sample(
            key=SampleKey(rollout=0, group=0, index=index),
            prompt=prompt,
            seed=index,
            initial_seed=index,
            weight_version=0,
            media=torch.zeros(1, 2, 2, 3, dtype=torch.uint8),
            fps=None,
            streams={},
        )
        for index in range(count)
    )
    microgroup = Microgroup(samples=samples, conditioning=Conditioning(positive={}, negative=None), echo={})
    scores = Scores(by_reward={name: tuple(row) for name, row in values.items()})
    return Group(rollout=0, index=0, prompt=prompt, microgroups=(microgroup,), scores=(scores,), metadata=metadata)


def dropped(folder: Path, filters: str, *groups: Group) -> list[str | None]:
    chosen = GroupFilters(recipe_with(folder, TWO, f"rollout.filters={filters}"))
    return [chosen.dropped_by(group) for group in groups]


def test_zero_variance_and_none(tmp_path: Path) -> None:
    groups = [
        group_of({"jpeg_size": [0.5, 0.5], "brightness": [0.0, 1.0]}),
        group_of({"jpeg_size": [0.5, 0.5], "brightness": [0.25, 0.25]}),
        group_of({"jpeg_size": [0.5, NAN], "brightness": [0.0, 1.0]}),
        group_of({"jpeg_size": [0.5, NAN, 0.7], "brightness": [0.0, 1.0, 0.0]}),
        group_of({"jpeg_size": [NAN, NAN], "brightness": [NAN, NAN]}),
        group_of({"jpeg_size": [0.5, 0.6]}),  # a row to which the other reward does not apply
    ]
    flat = "zero_variance"
    assert dropped(tmp_path, "[{type='zero_variance'}]", *groups) == [None, flat, flat, None, flat, None]
    assert dropped(tmp_path, "[]", *groups) == dropped(tmp_path, "[{type='none'}]", *groups) == [None] * 6
    assert has_zero_variance(groups[0].rewards(), {"jpeg_size": 1.0, "brightness": 0.0})


def test_weighted_totals() -> None:
    rewards = {"a": [1.0, NAN], "b": [0.5, 0.5], "watched": [NAN, NAN]}
    first, second = weighted_sums(rewards, {"a": 1.0, "b": 2.0, "watched": 0.0, "elsewhere": 1.0})
    assert first == 2.0
    assert math.isnan(second)
    assert all(map(math.isnan, weighted_sums(rewards, {"elsewhere": 1.0})))


@pytest.mark.parametrize(
    ("of", "expected"),
    [("mean", [None, "easy", None]), ("best", ["easy", "easy", None]), ("worst", [None, "easy", None])],
)
def test_reward_range(tmp_path: Path, of: str, expected: list[str | None]) -> None:
    groups = [
        group_of({"jpeg_size": [0.0, 1.0], "brightness": [0.0, 0.0]}),  # mean 0.5, best 1
        group_of({"jpeg_size": [1.0, 1.0], "brightness": [0.0, 0.5]}),  # mean 1.5, worst 1
        group_of({"jpeg_size": [NAN, 0.1], "brightness": [5.0, 0.0]}),  # the first sample has no reward
    ]
    table = f"[{{type='reward_range', name='easy', high=0.9, of='{of}'}}]"
    assert dropped(tmp_path, table, *groups) == expected


def test_a_group_without_a_finite_reward_is_in_no_range(tmp_path: Path) -> None:
    lost = group_of({"jpeg_size": [NAN, NAN], "brightness": [1.0, 1.0]})
    assert dropped(tmp_path, "[{type='reward_range', low=-100.0}]", lost) == ["reward_range"]


def wants_level(rewards: Mapping[str, Sequence[float]], prompt: str, metadata: Mapping[str, Any], *, least: int) -> Any:
    """A user's filter; a negative level is answered wrongly."""
    assert set(rewards) == {"jpeg_size"}
    assert prompt == "a cat"
    return metadata["level"] >= least if metadata["level"] >= 0 else "no"


def test_a_users_function_is_told_of_the_row(tmp_path: Path) -> None:
    table = "[{type='python', path='test_filters:wants_level', name='level', options={least=2}}]"
    rows = [group_of({"jpeg_size": [0.0, 1.0]}, level=level) for level in (1, 2)]
    assert dropped(tmp_path, table, *rows) == ["level", None]
    with pytest.raises(
        ConfigError, match=r"test_filters:wants_level answered 'no' for 'a cat'; it must be True or False"
    ):
        dropped(tmp_path, table, group_of({"jpeg_size": [0.0]}, level=-1))
    with pytest.raises(ConfigError, match=r"rollout\.filters\.path = 'test_filters:absent' cannot be imported"):
        dropped(tmp_path, "[{type='python', path='test_filters:absent'}]")
    with pytest.raises(ConfigError, match="is float, not a function"):
        dropped(tmp_path, "[{type='python', path='test_filters:NAN'}]")


def test_the_first_filter_that_drops_a_group_is_counted(tmp_path: Path) -> None:
    table = "[{type='reward_range', low=0.5}, {type='zero_variance'}]"
    low, flat = group_of({"jpeg_size": [0.1, 0.1]}), group_of({"jpeg_size": [0.6, 0.6]})
    assert dropped(tmp_path, table, low, flat) == ["reward_range", "zero_variance"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.filters=[{type='reward_range'}]"], "reward_range without low and high drops nothing"),
        (["rollout.filters=[{type='reward_range', low=2.0, high=1.0}]"], "drops all groups"),
        (["rollout.filters=[{type='zero_variance'}, {type='zero_variance'}]"], "zero_variance twice"),
        (["rollout.filters=[{type='zero_varianse'}]"], "did you mean 'zero_variance'"),
        (["rollout.filter={type='none'}"], "did you mean 'filters'"),
        (["rollout.dynamic.enabled=true", "rollout.filters=[]"], r"rollout\.filters drops nothing"),
        (["rollout.dynamic={enabled=true, max_groups=1}"], r"max_groups = 1 is below rollout\.num_groups = 2"),
    ],
)
def test_what_a_recipe_may_not_say(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_with(tmp_path, *overrides)


def test_all_groups_dropped_is_a_batch_without_steps(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, "trainer.steps_per_rollout=2", "trainer.ranks=2")
    batch = make_batch(recipe, [group_of({"jpeg_size": [0.5] * 4})] * 2)
    assert (batch.num_steps, batch.num_pairs, batch.shares) == (0, 0, [[], []])
