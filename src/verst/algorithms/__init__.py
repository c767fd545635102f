"""Objectives: advantages, and one file for each algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verst.algorithms.base import Algorithm
from verst.algorithms.flow_grpo import FlowGrpo
from verst.algorithms.nft import Nft
from verst.config import sections as s

ALGORITHMS: dict[type[s.AlgorithmBase], Callable[..., Algorithm]] = {
    s.FlowGrpoConfig: FlowGrpo,
    s.NftConfig: Nft,
}
"""Recipe section -> algorithm."""


def make_algorithm(config: Any, *, sampling: s.SamplingConfig, seed: int) -> Algorithm:
    """The algorithm of a recipe's section; seed is the run's."""
    return ALGORITHMS[type(config)](config, sampling=sampling, seed=seed)
