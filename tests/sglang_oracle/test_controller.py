"""verst's controller and scheduler against SGLang-Diffusion's own, which run in a subprocess: equal bits in all tensors."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import rollout_parity
from rollout_parity import Case

pytestmark = pytest.mark.sglang


def cases() -> list[Case]:
    """The benchmark's, and other dtypes, seeds, grids, noise levels and the log-prob without constants."""
    usual = [case for case in rollout_parity.all_cases() if case.mode in rollout_parity.IN_SGLANG]
    half = [dataclasses.replace(case, dtype="fp16") for case in usual if case.dtype == "bf16"]
    others = []
    for case, (seeds, shift, all_no_const) in itertools.product(
        [case for case in usual if case.num_shards == 1],
        [((0,), 1.0, False), ((5, 6, 7), 6.5, True), ((2**62 + 11, 3), 2.0, False)],
    ):
        others.append(dataclasses.replace(case, seeds=seeds, shift=shift, all_no_const=all_no_const))
    levels = [
        dataclasses.replace(case, eta=eta)
        for case in usual
        if case.mode != "ode" and case.shapes == "image" and case.num_shards == 1
        for eta in (0.05, 0.35, 1.0)
    ]
    return [*usual, *half, *others, *levels]


@pytest.fixture(scope="module")
def answers(sglang_wheel: Path) -> dict[Case, dict[str, rollout_parity.Tensors]]:
    return rollout_parity.sglang_answers(cases(), sglang_wheel)


@pytest.mark.parametrize("mode", rollout_parity.IN_SGLANG)
def test_every_tensor_is_sglangs(mode: str, answers: dict[Case, dict[str, rollout_parity.Tensors]]) -> None:
    chosen = [case for case in cases() if case.mode == mode]
    assert len(chosen) > 60
    different = []
    for case in chosen:
        for rank in rollout_parity.rolled_out(case, "noise"):
            same, total = rollout_parity.equal_counts(case, rank, answers[case])
            assert total >= 5
            if same != total:
                different.append((case, f"{same} of {total}"))
    assert different == []


def test_the_committed_table_names_this_sglang(sglang_wheel: Path) -> None:
    """Run benchmarks/rollout_parity.py again when the wheel is another one."""
    (found,) = sglang_wheel.glob("sglang-*.dist-info")
    table = Path(rollout_parity.ROOT / "benchmarks" / "results" / "rollout_parity.json").read_text()
    assert f'"sglang": "{found.name.removeprefix("sglang-").removesuffix(".dist-info")}"' in table
