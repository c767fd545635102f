"""Each alarm on histories made by hand: raised exactly when it should be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from verst.obs import alarms
from verst.obs.alarms import ROLLED_BACK_TO, Above, Alarm, Collapse, Drop, Hacking, NonFinite, Spike

NAN = math.nan


def history(**columns: Sequence[float | None]) -> list[dict[str, float]]:
    """Rows 0, 1, ... from columns; `_` stands for `/`, None for a metric that the row does not have."""
    names = {name: name.replace("__", "/") for name in columns}
    return [
        {"iteration": i, **{names[n]: v for n, v in zip(columns, values, strict=True) if v is not None}}
        for i, values in enumerate(zip(*columns.values(), strict=True))
    ]


def raised_at(alarm: Alarm, rows: Sequence[dict[str, float]], *, patience: int = 1) -> tuple[list[int], list[int]]:
    """Iterations at which it stands, and those of them at which it is news."""
    found = {i: alarms.raised(alarm, rows[: i + 1], patience=patience) for i in range(len(rows))}
    return [i for i, r in found.items() if r], [i for i, r in found.items() if r and r.new]


def test_a_bound_is_crossed_above_it_alone() -> None:
    rows = history(policy__kl=[0.1, 0.2, 0.3, None, NAN, 0.4, 0.2, 0.5])
    assert raised_at(Above(metric="policy/kl", above=0.2), rows) == ([2, 5, 7], [2, 7])
    assert raised_at(Above(metric="policy/kl", above=0.2), history(train__loss=[1.0, 2.0])) == ([], [])


@pytest.mark.parametrize(("patience", "stands"), [(1, [1, 2, 3, 5, 6]), (2, [2, 3, 6]), (3, [3]), (4, [])])
def test_patience_counts_readings_in_a_row(patience: int, stands: list[int]) -> None:
    rows = history(x=[0.0, 2.0, 2.0, 2.0, 1.0, 2.0, 2.0])
    got, new = raised_at(Above(metric="x", above=1.0), rows, patience=patience)
    assert got == stands
    assert new == [i for i in stands if i - 1 not in stands]


def test_a_share_has_its_own_denominator() -> None:
    alarm = Above(metric="rollout/zero_variance_groups", per="rollout/groups", above=0.5)
    rows = history(rollout__zero_variance_groups=[1, 2, 3, 3, 0], rollout__groups=[4, 4, 4, 8, 0])
    assert raised_at(alarm, rows) == ([2], [2])
    text = alarms.raised(alarm, rows[:3], patience=1)
    assert text is not None
    assert text.text == "rollout/zero_variance_groups / rollout/groups is 0.75, above 0.5"


def test_non_finite_names_what_is() -> None:
    rows = history(reward__train_mean=[0.5, NAN, math.inf, 0.5], train__loss=[1.0, 1.0, NAN, 1.0])
    assert raised_at(NonFinite(), rows) == ([1, 2], [1])
    text = alarms.raised(NonFinite(), rows[:3], patience=2)
    assert text is not None
    assert text.text == "not finite: reward/train_mean, train/loss"


def test_a_spike_is_against_the_median_of_those_before() -> None:
    alarm = Spike(metric="train/grad_norm", factor=10.0, window=3)
    # The first 100 comes too early; the median of 1, 1, 100 is 1; that of 1, 100, 11 is 11.
    rows = history(train__grad_norm=[1.0, 1.0, 100.0, 10.0, 11.0, 101.0, 2000.0, None, 50.0])
    assert raised_at(alarm, rows) == ([6], [6])
    rows = history(train__grad_norm=[1.0, 1.0, 1.0, 10.0, 10.001])
    assert raised_at(alarm, rows) == ([4], [4])


def test_a_collapse_is_against_the_mean_of_the_first_readings() -> None:
    alarm = Collapse(metric="rollout/diversity", fraction=0.5, start=2)
    rows = history(rollout__diversity=[None, 0.3, 0.1, 0.1, 0.099, NAN, 0.05, 0.3])
    assert raised_at(alarm, rows) == ([4, 6], [4])
    assert raised_at(alarm, rows, patience=2) == ([6], [6])


def test_a_drop_is_below_the_best_reading() -> None:
    heldout = [0.4, None, 0.8, 0.7, NAN, 0.6, 0.9, 0.65]
    rows = history(reward__heldout=heldout, reward__train_std=[None, 0.3, 0.3, 0.3, 0.3, 0.5, 0.5, 0.5])
    metric, spread = "reward/heldout", "reward/train_std"
    assert raised_at(Drop(metric=metric, drop=0.15, spread=spread), rows) == ([5, 7], [5, 7])
    # Half of the spread: 0.15 up to iteration 4, 0.25 from 5 on.
    assert raised_at(Drop(metric=metric, drop=None, spread=spread), rows) == ([], [])
    rows[-1]["reward/heldout"] = 0.64
    assert raised_at(Drop(metric=metric, drop=None, spread=spread), rows) == ([7], [7])
    assert raised_at(Drop(metric=metric, drop=None, spread=spread), history(reward__heldout=[1.0, -9.0])) == ([], [])


def test_hacking_is_gold_down_and_proxy_up() -> None:
    alarm = Hacking(gold=("reward/gold/a", "reward/gold/b"), proxy="reward/heldout", window=3, drop=0.1, rise=0.1)
    up, down = [0.0, None, 0.2, None, 0.4, 0.6], [0.9, None, 0.5, None, 0.6, 0.2]
    flat: list[float | None] = [0.5, None, 0.5, None, 0.5, NAN]
    assert raised_at(alarm, history(reward__heldout=up, reward__gold__a=down)) == ([4, 5], [4])
    assert raised_at(alarm, history(reward__heldout=down, reward__gold__a=up)) == ([], [])
    assert raised_at(alarm, history(reward__heldout=up, reward__gold__a=flat)) == ([], [])
    assert raised_at(alarm, history(reward__heldout=flat, reward__gold__a=down)) == ([], [])
    assert raised_at(alarm, history(reward__heldout=up, reward__gold__a=flat, reward__gold__b=down))[0] == [4, 5]
    # Two readings are no window, however bad.
    assert raised_at(alarm, history(reward__heldout=up, reward__gold__a=[None, None, 0.9, None, 0.0, None])) == ([], [])


def test_the_fitted_change_is_that_of_the_least_squares_line() -> None:
    x, y = [0, 2, 3, 7], [1.0, -1.0, 4.0, 2.0]
    rows = [{"iteration": i, "m": v} for i, v in zip(x, y, strict=True)]
    mean_x, mean_y = sum(x) / 4, sum(y) / 4
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    assert alarms.fitted_change(rows, "m") == pytest.approx(slope * 7, rel=1e-12)


def test_undone_iterations_do_not_count() -> None:
    rows = history(x=[0.0, 1.0, 2.0, 9.0, 9.0, 3.0, 9.0, 4.0])
    rows[4][ROLLED_BACK_TO] = 2
    assert [row["x"] for row in alarms.counted(rows)] == [0.0, 1.0, 2.0, 3.0, 9.0, 4.0]
    rows[6][ROLLED_BACK_TO] = 1  # back beyond the first one
    assert [row["x"] for row in alarms.counted(rows)] == [0.0, 1.0, 4.0]


def test_the_best_is_the_first_of_the_largest_readings() -> None:
    rows = history(x=[0.1, None, 0.5, NAN, 0.5, 0.4])
    assert alarms.best(rows, "x") == 2
    assert alarms.best(rows, "x", among={0, 4, 5}) == 4
    assert alarms.best(rows, "x", among={1, 3}) is None
    assert alarms.best(rows, "y") is None


def test_stop_rules() -> None:
    def why(
        values: Sequence[float | None], *, at_least: float | None = None, evaluations: int | None = None
    ) -> str | None:
        return alarms.stop_reason(history(m=values), "m", at_least=at_least, no_improvement_for=evaluations)

    assert why([0.5, 0.8], at_least=0.8) == "m is 0.8 and has reached 0.8"
    assert why([0.5, 0.9, 0.7], at_least=0.8) is None  # the newest decides
    assert why([0.5, 0.9, None], at_least=0.8) is None
    assert why([0.5, 0.9, NAN], at_least=0.8) is None
    assert why([0.5, 0.4, None, 0.5], evaluations=2) == "m has had no new best for 2 evaluations (best 0.5)"
    assert why([0.5, 0.4, NAN], evaluations=2) is None
    assert why([0.5, 0.4, 0.6], evaluations=2) is None
    assert why([0.5], at_least=None, evaluations=None) is None


def test_rows_of_the_log_have_nan_again() -> None:
    (row,) = alarms.from_log([{"iteration": 3, "a": None, "b": 1.5, "non_finite": ["a"]}])
    assert row.keys() == {"iteration", "a", "b"}
    assert math.isnan(row["a"])
