"""Advantages over complete groups: who did better than the other samples of the same prompt."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

GroupedRewards = Mapping[str, Sequence[Sequence[float] | None]]
"""reward name -> groups -> one value a sample; None where the reward does not apply to the group."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The advantages of one rollout, in the order of its groups and their samples."""

    values: tuple[tuple[float, ...], ...]
    """One a sample; 0 where `mask` is False and in constant and single groups."""
    mask: tuple[tuple[bool, ...], ...]
    """False for samples without a finite reward: they must not be trained on."""
    num_masked: int
    """Samples with mask False."""
    num_constant_groups: int
    """Groups whose advantages are all 0: equal rewards, or fewer than two finite samples."""
    num_trainable: int
    """Samples with an advantage other than 0; with none the rollout has nothing to teach and the step is skipped."""


def advantages(
    rewards: GroupedRewards,
    weights: Mapping[str, float],
    *,
    mixture: Literal["normalize_each", "weighted_sum"] = "normalize_each",
    std: Literal["group", "batch", "none"] = "group",
    epsilon: float = 1e-4,
    clamp: float = 5.0,
) -> Advantages:
    """Group-relative advantages (Flow-GRPO, arXiv 2505.05470 eq. 6; GDPO, arXiv 2601.05242, for several rewards).

    With r the rewards of one group of one prompt and all statistics over its finite samples, in float64:

        N(r)_i = (r_i - mean(r)) / (s + epsilon),  s = std(r) | std over the rollout | no division
        A_i = clamp(sum_k w_k N(r_k)_i)        normalize_each: one reward of small spread still counts
        A_i = clamp(N(sum_k w_k r_k)_i)        weighted_sum

    std is the population one (divided by n). A sample with a non-finite reward of weight other than 0 is masked: it
    gets 0 and enters no mean and no std. Equal rewards and a group of one give exactly 0.

    rewards: reward name -> groups -> one value a sample, or None where the reward does not apply to that group's prompt:
    it then enters neither sum, and the others decide alone. weights: the same names. For `batch`, pass all groups of
    the rollout, those that a filter will drop included. Raises ValueError where names or group sizes differ.
    """
    sizes = _check(rewards, weights)
    edges = np.cumsum([0, *sizes])
    groups = [slice(int(a), int(b)) for a, b in itertools.pairwise(edges)]
    weighted = {name: w for name, w in weights.items() if w != 0}
    # bool by name: without any group numpy would take floats.
    there = {name: np.array([g is not None for g in rewards[name]], dtype=bool) for name in weighted}
    applies = {name: np.repeat(column, sizes) for name, column in there.items()}
    flat = {name: _column(rewards[name], sizes) for name in weighted}
    finite = np.ones(int(edges[-1]), dtype=bool)
    for name, column in flat.items():
        finite &= np.isfinite(column) | ~applies[name]
    total = np.zeros(len(finite))
    if mixture == "normalize_each":
        for name, weight in weighted.items():
            total += weight * _normalise(flat[name], finite & applies[name], groups, std, epsilon)
    else:
        columns = [weight * np.where(finite & applies[name], flat[name], 0.0) for name, weight in weighted.items()]
        mixed = np.sum(columns, axis=0) if columns else total
        total = _normalise(mixed, finite, groups, std, epsilon)
    total = np.clip(total, -clamp, clamp) + 0.0  # no -0.0
    return Advantages(
        values=tuple(tuple(total[g].tolist()) for g in groups),
        mask=tuple(tuple(finite[g].tolist()) for g in groups),
        num_masked=int((~finite).sum()),
        num_constant_groups=sum(not total[g].any() for g in groups),
        num_trainable=int(np.count_nonzero(total)),
    )


def _normalise(
    values: np.ndarray,
    finite: np.ndarray,
    groups: Sequence[slice],
    std: Literal["group", "batch", "none"],
    epsilon: float,
) -> np.ndarray:
    """N(r) of the docstring above, [samples]; 0 where not finite."""
    out = np.zeros(len(values))
    batch_std = float(values[finite].std()) if std == "batch" and finite.any() else 0.0
    for group in groups:
        kept = finite[group]
        r = values[group][kept]
        if len(r) < 2 or r.min() == r.max():  # exactly 0: the mean of equal floats may be off by a rounding
            continue
        scale = {"group": float(r.std()) + epsilon, "batch": batch_std + epsilon, "none": 1.0}[std]
        out[group][kept] = (r - r.mean()) / scale
    return out


def _column(groups: Sequence[Sequence[float] | None], sizes: Sequence[int]) -> np.ndarray:
    """[samples]; NaN where the reward does not apply."""
    parts = [[math.nan] * size if group is None else group for group, size in zip(groups, sizes, strict=True)]
    return np.array([value for part in parts for value in part], dtype=np.float64)


def _check(rewards: GroupedRewards, weights: Mapping[str, float]) -> list[int]:
    """Sizes of the groups."""
    if not rewards or set(rewards) != set(weights):
        raise ValueError(
            f"rewards {sorted(rewards)} and weights {sorted(weights)} must have the same names, at least one"
        )
    by_name = {name: [None if g is None else len(g) for g in groups] for name, groups in rewards.items()}
    if len({len(sizes) for sizes in by_name.values()}) > 1:
        raise ValueError(f"rewards differ in their numbers of groups: {by_name}")
    found = [{size for size in column if size is not None} for column in zip(*by_name.values(), strict=True)]
    if any(len(sizes) != 1 for sizes in found):
        raise ValueError(f"rewards differ in their group sizes, or none applies to a group: {by_name}")
    return [size for sizes in found for size in sizes]
