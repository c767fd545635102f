"""Whole Flow-GRPO runs on two real servers, behind verst's adapters and router, one of them killed on the way."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sglang_run

from verst.families.tiny import build_tiny

pytestmark = pytest.mark.sglang
ITERATIONS = 10
LAST_BITS = 16 * 2**-23
"""Of a ratio near 1: SGLang's log-prob is that of the drawn noise, the trainer's that of the latent which came out."""


@pytest.fixture(scope="module")
def place(sglang_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    build_tiny("sd3.5", folder / "model")
    return folder


def run(place: Path, kind: str) -> dict[str, Any]:
    return sglang_run.run(kind, place / kind.replace(", ", "_"), place / "model", ITERATIONS)


def test_lora_with_a_server_that_is_killed(place: Path) -> None:
    undisturbed, disturbed = run(place, "lora"), run(place, "lora, killed")
    for result in (undisturbed, disturbed):
        assert result["iterations"] == ITERATIONS
        assert result["samples"] == ITERATIONS * sglang_run.GROUPS * sglang_run.GROUP_SIZE
        assert result["ratio_max_deviation"] <= LAST_BITS
    assert disturbed["killed"] is not None
    assert "engine" in disturbed["output"]
    expected, found = (sglang_run.final_tensors(place / name) for name in ("lora", "lora_killed"))
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_all_weights(place: Path) -> None:
    result = run(place, "full")
    assert result["iterations"] == ITERATIONS
    assert result["ratio_max_deviation"] <= LAST_BITS


def test_old_log_probs_of_the_trainers_own_make_the_ratio_exact(place: Path) -> None:
    assert run(place, "recompute")["ratio_max_deviation"] == 0.0
