"""`verst chaos`: what its schedule is, what its checks find, and a short one against the real command."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from run_fixtures import final_tensors, metric_rows, recipe_with, write_recipe

from verst.cli.main import app
from verst.errors import CheckpointError, ConfigError
from verst.loops.chaos import KINDS, chaos, kinds_of, schedule
from verst.loops.ledger import Ledger, ledger_faults, read_ledger


def test_a_schedule_is_a_function_of_its_seed() -> None:
    made = schedule(7, 200, KINDS, hangs=["engine"], longest_wait_s=2.0)
    assert made == schedule(7, 200, KINDS, hangs=["engine"], longest_wait_s=2.0)
    assert made != schedule(8, 200, KINDS, hangs=["engine"], longest_wait_s=2.0)
    assert {fault.kind for fault in made} == set(KINDS)
    assert {fault.kind for fault in made if fault.action == "hang"} == {"engine"}
    assert all(0.0 <= fault.wait_s <= 2.0 and 0.0 <= fault.choice < 1.0 for fault in made)
    actions = Counter(fault.action for fault in made)
    assert actions["kill"] > actions["pause"] > actions["hang"] > 0


def test_the_command_names_every_kind() -> None:
    command = typer.main.get_command(app).commands["chaos"]  # type: ignore[attr-defined]
    (told,) = [option.help for option in command.params if option.name == "kinds"]
    assert told.startswith(f"{', '.join(KINDS)};")


def row(iteration: int, *, version: int | None = None) -> dict[str, Any]:
    group = {
        "rollout": iteration - 1,
        "dropped_by": None,
        "indices": [0, 1],
        "versions": [iteration - 1 if version is None else version] * 2,
        "rewards": [0.5, None],
        "counts": [True, False],
    }
    groups = [dict(copy.deepcopy(group), group=number) for number in range(2)]
    groups[1] |= {"dropped_by": "zero_variance", "counts": [True, True]}
    return {"iteration": iteration, "groups": groups}


def faults_of(rows: list[dict[str, Any]], *, staleness: int = 0) -> list[str]:
    return list(ledger_faults(rows, iterations=3, groups=2, group_size=2, staleness=staleness))


def test_a_ledger_without_a_fault_has_none() -> None:
    assert faults_of([row(1), row(2), row(3)]) == []
    assert faults_of([row(1, version=0), row(2, version=0), row(3, version=1)], staleness=1) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.pop(1), "iterations are 1, 3, not 1..3, each once"),
        (lambda rows: rows.insert(1, row(1)), "iterations are 1, 1, 2, 3, not 1..3"),
        (lambda rows: rows[1]["groups"].pop(), "iteration 2: 1 groups, not 2"),
        (lambda rows: rows[1]["groups"][0].update(indices=[0, 0]), "group 1.0 holds samples 0, 0, not 0..1"),
        (lambda rows: rows[1]["groups"][0].update(indices=[1]), "group 1.0 holds samples 1, not 0..1"),
        (lambda rows: rows[2]["groups"][0].update(versions=[2, 1]), "group 2.0 is of weight versions 2, 1"),
        (lambda rows: rows[2]["groups"][0].update(versions=[2, 3]), "group 2.0 is of weight versions 2, 3"),
        (lambda rows: rows[0]["groups"][0].update(counts=[True, True]), "group 0.0: samples [1] have no reward"),
        (lambda rows: rows[2]["groups"][0].update(rollout=1), "group 1.0 was trained on in iteration 2 already"),
    ],
)
def test_what_must_not_be_in_a_ledger_is_named(change: Any, said: str) -> None:
    rows = [row(1), row(2), row(3)]
    change(rows)
    assert any(said in line for line in faults_of(rows)), faults_of(rows)


def test_a_ledger_forgets_what_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    ledger = Ledger(path)
    for number in (1, 2, 3):
        ledger.append(row(number))
    with path.open("a") as file:
        file.write('{"iteration": 4, "gro')
    ledger.truncate_after(1)
    ledger.append(row(2))
    ledger.close()
    assert read_ledger(path) == [row(1), row(2)]
    for damaged in ("hello", "[]", '{"iteration": 3}'):
        path.write_text(json.dumps(row(1)) + f"\n{damaged}\n")
        with pytest.raises(CheckpointError, match=r"trained\.jsonl:2 is damaged"):
            Ledger(path).truncate_after(1)


@pytest.mark.ray
def test_a_run_among_faults_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Invariant 8 with every kind of process: killed, each of them once, and an engine stopped for a while."""
    recipe, out = write_recipe(tmp_path), tmp_path / "out"
    there = kinds_of(recipe_with(tmp_path))
    kinds = schedule(1341, 6, there, hangs=["engine", "trainer", "parser"], longest_wait_s=1.0)
    assert sorted(fault.kind for fault in kinds if fault.action == "kill") == sorted(there)
    command = ["chaos", str(recipe), "run.iterations=16", "--seed", "1341", "--faults", "6", "--limit", "60"]
    done = subprocess.run(
        [sys.executable, "-m", "verst.cli.main", *command, "--out", str(out), "--json"],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "RAY_ADDRESS": "127.0.0.1:9"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert [(hit["kind"], hit["action"]) for hit in outcome["injected"]] == [(f.kind, f.action) for f in kinds]
    assert (outcome["driver_starts"], outcome["problems"]) == (2, [])
    assert (outcome["iterations"], outcome["samples"]) == (16, 16 * 8)

    calm, stormy = (out / name / "run" for name in ("calm", "stormy"))
    expected, got = final_tensors(calm), final_tensors(stormy)
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert [r["iteration"] for r in metric_rows(stormy)] == list(range(17))
    events = [json.loads(line) for line in (stormy / "events" / "supervision.jsonl").read_text().splitlines()]
    back = {event["process"].split(" ")[0] for event in events if event["name"] == "restart"}
    # The others may have died with the driver, before they were asked again.
    assert back >= {"engine", "trainer"}
    with pytest.raises(ConfigError, match="holds a disturbed run already"):
        chaos(None, recipe, [], out=out, seed=0, faults=1, kinds=KINDS, limit_s=60, timeout_s=1)  # type: ignore[arg-type]
