"""Advantages over complete groups: who did better than the other samples of the same prompt."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


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
    rewards: Mapping[str, Sequence[Sequence[float]]],
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

    rewards: reward name -> groups -> one value a sample; weights: the same names. For `batch`, pass all groups of
    the rollout, those that a filter will drop included. Raises ValueError where names or group sizes differ.
    """
    sizes = _check(rewards, weights)
    edges = np.cumsum([0, *sizes])
    groups = [slice(int(a), int(b)) for a, b in itertools.pairwise(edges)]
    weighted = {name: w for name, w in weights.items() if w != 0}
    flat = {name: np.array([v for g in rewards[name] for v in g], dtype=np.float64) for name in weighted}
    finite = np.ones(int(edges[-1]), dtype=bool)
    for column in flat.values():
        finite &= np.isfinite(column)
    total = np.zeros(len(finite))
    if mixture == "normalize_each":
        for name, weight in weighted.items():
            total += weight * _normalise(flat[name], finite, groups, std, epsilon)
    else:
        columns = [weight * np.where(finite, flat[name], 0.0) for name, weight in weighted.items()]
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


def _check(rewards: Mapping[str, Sequence[Sequence[float]]], weights: Mapping[str, float]) -> list[int]:
    """Sizes of the groups."""
    if not rewards or set(rewards) != set(weights):
        raise ValueError(
            f"rewards {sorted(rewards)} and weights {sorted(weights)} must have the same names, at least one"
        )
    by_name = {name: [len(group) for group in groups] for name, groups in rewards.items()}
    sizes = next(iter(by_name.values()))
    if any(other != sizes for other in by_name.values()):
        raise ValueError(f"rewards differ in their group sizes: {by_name}")
    return sizes
