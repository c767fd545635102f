"""Objectives: advantages, and one file for each algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verst.algorithms.awm import Awm
from verst.algorithms.base import Algorithm
from verst.algorithms.dpo import Dpo
from verst.algorithms.flow_grpo import FlowGrpo
from verst.algorithms.grpo_guard import GrpoGuard
from verst.algorithms.nft import Nft
from verst.algorithms.online_sft import OnlineSft
from verst.algorithms.python import Python
from verst.config import sections as s

ALGORITHMS: dict[type[s.AlgorithmBase], Callable[..., Algorithm]] = {
    s.FlowGrpoConfig: FlowGrpo,
    s.GrpoGuardConfig: GrpoGuard,
    s.NftConfig: Nft,
    s.AwmConfig: Awm,
    s.DpoConfig: Dpo,
    s.OnlineSftConfig: OnlineSft,
    s.PythonAlgorithm: Python,
}
"""Recipe section -> algorithm."""


def make_algorithm(config: Any, *, sampling: s.SamplingConfig, seed: int) -> Algorithm:
    """The algorithm of a recipe's section; seed is the run's."""
    return ALGORITHMS[type(config)](config, sampling=sampling, seed=seed)
