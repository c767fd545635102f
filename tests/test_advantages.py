"""Advantages: an independent formula, the faults of other systems (CPU-9, CPU-15), and properties."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verst.algorithms.advantages import advantages

NAN = math.nan


def one(groups, **options):
    return advantages({"r": groups}, {"r": 1.0}, **options)


def reference(group, epsilon=1e-4):
    mean, std = statistics.fmean(group), statistics.pstdev(group)
    return [(r - mean) / (std + epsilon) for r in group]


def test_group_std_matches_the_formula():
    result = one([[0.0, 1.0, 0.25, 0.5], [3.0, 1.0, 2.0, 2.0]])
    assert result.values[0] == pytest.approx(reference([0.0, 1.0, 0.25, 0.5]), rel=1e-12)
    assert result.values[1] == pytest.approx(reference([3.0, 1.0, 2.0, 2.0]), rel=1e-12)
    assert (result.num_masked, result.num_constant_groups, result.num_trainable) == (0, 0, 6)


def test_batch_std_is_over_all_samples_and_the_mean_over_the_group():
    groups = [[0.0, 1.0], [3.0, 5.0]]
    scale = statistics.pstdev([0.0, 1.0, 3.0, 5.0]) + 1e-4
    assert one(groups, std="batch").values == (
        pytest.approx([-0.5 / scale, 0.5 / scale]),
        pytest.approx([-1 / scale, 1 / scale]),
    )


def test_no_std_only_subtracts_the_mean():
    assert one([[0.0, 1.0, 5.0]], std="none").values == ((-2.0, -1.0, 3.0),)


def test_clamp_and_epsilon():
    spread = [0.0] * 63 + [1.0]
    assert max(one([spread]).values[0]) == 5.0
    assert max(one([spread], clamp=2.0).values[0]) == 2.0
    assert one([[0.0, 2.0]], epsilon=1.0).values[0] == pytest.approx([-0.5, 0.5])


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_cpu9_constant_single_and_nan(std):
    result = one([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, NAN, 1.0], [7.0], [0.1, 0.1, 0.1]], std=std)
    assert result.values[0] == (0.0, 0.0, 0.0, 0.0)
    assert result.values[2] == (0.0,)
    assert result.values[3] == (0.0, 0.0, 0.0)
    assert result.mask[1] == (True, True, False, True)
    assert result.values[1][2] == 0.0
    low, high = result.values[1][0], result.values[1][1]
    assert low < 0 < high == result.values[1][3]
    assert low == pytest.approx(-2 * high)
    assert (result.num_masked, result.num_constant_groups, result.num_trainable) == (1, 3, 3)


def test_nan_leaves_the_rest_as_if_the_sample_were_not_there():
    with_nan, without = one([[0.0, 1.0, NAN, 0.25], [2.0, 3.0]]), one([[0.0, 1.0, 0.25], [2.0, 3.0]])
    assert (*with_nan.values[0][:2], with_nan.values[0][3]) == without.values[0]
    assert with_nan.values[1] == without.values[1]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_non_finite_is_masked_whatever_it_is(bad):
    result = one([[bad, 1.0, 2.0]], std="batch")
    assert result.mask[0] == (False, True, True)
    assert all(map(math.isfinite, result.values[0]))


def test_nothing_trainable():
    for groups in ([[1.0, 1.0], [2.0, 2.0]], [[NAN, NAN], [NAN, 1.0]], [[3.0], [4.0]]):
        for std in ("group", "batch", "none"):
            result = one(groups, std=std)
            assert result.num_trainable == 0
            assert result.num_constant_groups == len(groups)
            assert all(value == 0.0 for group in result.values for value in group)


def test_cpu15_normalising_each_reward_lets_the_harder_one_count():
    rng = np.random.default_rng(0)
    correlations = {"normalize_each": [], "weighted_sum": []}
    for _ in range(50):
        a, b = rng.normal(0.5, 0.2, 24), rng.normal(0.27, 0.01, 24)
        for mixture, found in correlations.items():
            rewards = {"a": [a.tolist()], "b": [b.tolist()]}
            result = advantages(rewards, {"a": 1.0, "b": 1.0}, mixture=mixture)
            found.append(np.corrcoef(result.values[0], b)[0, 1])
    assert np.mean(correlations["normalize_each"]) == pytest.approx(1 / math.sqrt(2), abs=0.05)
    assert min(correlations["normalize_each"]) > 0.4
    assert np.mean(correlations["weighted_sum"]) == pytest.approx(0.05, abs=0.1)


def test_mixtures_match_the_formula():
    a, b = [0.0, 1.0, 0.5, 0.25], [3.0, 1.0, 2.0, 2.0]
    rewards, weights = {"a": [a], "b": [b]}, {"a": 1.0, "b": -0.5}
    each = [x - 0.5 * y for x, y in zip(reference(a), reference(b), strict=True)]
    assert advantages(rewards, weights).values[0] == pytest.approx(each, rel=1e-12)
    summed = reference([x - 0.5 * y for x, y in zip(a, b, strict=True)])
    assert advantages(rewards, weights, mixture="weighted_sum").values[0] == pytest.approx(summed, rel=1e-12)


def test_a_sample_is_masked_by_any_of_its_rewards_unless_its_weight_is_0():
    rewards = {"a": [[0.0, 1.0, 2.0]], "b": [[NAN, 1.0, 5.0]]}
    assert advantages(rewards, {"a": 1.0, "b": 1.0}).mask[0] == (False, True, True)
    watched = advantages(rewards, {"a": 1.0, "b": 0.0})
    assert watched.mask[0] == (True, True, True)
    assert watched.values == one([[0.0, 1.0, 2.0]]).values


def test_unlike_groups_and_names_are_refused():
    with pytest.raises(ValueError, match="group sizes"):
        advantages({"a": [[1.0, 2.0]], "b": [[1.0]]}, {"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="same names"):
        advantages({"a": [[1.0]]}, {"b": 1.0})
    with pytest.raises(ValueError, match="at least one"):
        advantages({}, {})


reward = st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3))
group = st.lists(reward | st.just(NAN), min_size=1, max_size=8)
rollout = st.lists(group, min_size=1, max_size=5)
stds = st.sampled_from(["group", "batch", "none"])


@settings(max_examples=60, deadline=None)
@given(rollout, stds, st.randoms(use_true_random=False))
def test_order_of_samples_and_groups_does_not_matter(groups, std, random):
    before = one(groups, std=std)
    order = [random.sample(range(len(g)), len(g)) for g in groups]
    places = random.sample(range(len(groups)), len(groups))
    after = one([[groups[p][i] for i in order[p]] for p in places], std=std)
    for place, group_values in zip(places, after.values, strict=True):
        expected = [before.values[place][i] for i in order[place]]
        assert group_values == pytest.approx(expected, rel=1e-6, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(rollout, st.integers(-50, 50))
def test_a_constant_added_to_a_group_changes_nothing(groups, shift):
    for std in ("group", "none"):
        before, after = one(groups, std=std), one([[r + shift for r in g] for g in groups], std=std)
        for a, b in zip(before.values, after.values, strict=True):
            assert b == pytest.approx(a, rel=1e-6, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(rollout, stds)
def test_bounds_mean_and_masks(groups, std):
    result = one(groups, std=std, clamp=1e6)
    for rewards, values, mask in zip(groups, result.values, result.mask, strict=True):
        assert mask == tuple(math.isfinite(r) for r in rewards)
        assert sum(values) == pytest.approx(0.0, abs=1e-6)
        ranked = sorted((r, a) for r, a, m in zip(rewards, values, mask, strict=True) if m)
        assert [a for _, a in ranked] == sorted(a for _, a in ranked)
    assert all(-5 <= value <= 5 for g in one(groups, std=std).values for value in g)


@settings(max_examples=40, deadline=None)
@given(rollout, st.floats(0.5, 4.0))
def test_scale_of_the_rewards_cancels_up_to_epsilon(groups, scale):
    before, after = one(groups, epsilon=1e-12), one([[scale * r for r in g] for g in groups], epsilon=1e-12)
    for a, b in zip(before.values, after.values, strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-5)
