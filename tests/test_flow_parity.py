"""The committed table of cases is what the code does: benchmarks/rollout_parity.py without SGLang's column."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    path = ROOT / "benchmarks" / "rollout_parity.py"
    spec = importlib.util.spec_from_file_location("rollout_parity", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rollout_parity"] = module
    spec.loader.exec_module(module)
    return module


def test_every_case_is_the_plain_loop_bit_for_bit(parity: ModuleType) -> None:
    lines = [parity.measure(case, None) for case in parity.all_cases()]
    assert len(lines) == 96
    assert [line for line in lines if not parity.is_equal(line)] == []


def test_a_tensor_that_differs_in_one_bit_is_found(parity: ModuleType) -> None:
    case = parity.all_cases()[0]
    (ours,) = parity.rolled_out(case, "stored")
    expected = {"visual": parity.reference(case, "visual", "stored")}
    same, total = parity.equal_counts(case, ours, expected)
    assert same == total == 9
    for name, tensor in expected["visual"].items():
        wrong = tensor.clone()
        wrong.view(-1)[-1] = torch.nextafter(wrong.view(-1)[-1], torch.tensor(9.0))
        changed = {"visual": {**expected["visual"], name: wrong}}
        assert parity.equal_counts(case, ours, changed) == (8, 9)
    assert parity.equal_counts(case, ours, {"visual": {}}) == (0, 9)


def test_the_committed_table_is_complete() -> None:
    table = json.loads((ROOT / "benchmarks" / "results" / "rollout_parity.json").read_text())
    assert (table["num_cases"], table["num_equal_cases"], len(table["cases"])) == (96, 96, 96)
    assert all(counts["equal"] == counts["compared"] > 0 for counts in table["tensors"].values())
    assert table["largest_float64_error"] <= 1e-6
    without = {line["mode"] for line in table["cases"] if line["sglang"] is None}
    assert without == {"dance"}
