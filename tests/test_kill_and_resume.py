"""Invariants 8 and 10: a driver that is killed at any instant and started again ends with the same bits, and leaves nothing.

The other processes are in test_chaos.py."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from async_fixtures import DECOUPLED, run_here
from run_fixtures import WORDS, final_tensors, learned, metric_rows, recipe_with, run_to_end, start_run, write_recipe

from verst.errors import CheckpointError
from verst.trainer import checkpoint

pytestmark = pytest.mark.ray

DYNAMIC = (
    "rollout.filters=[{type='zero_variance'}, {type='python', path='run_rewards:small_things', name='small'}]",
    "rollout.dynamic={enabled=true, extra=1, staleness=1}",
    "run.iterations=3",
    "sampling.steps={type='window', size=1, low=0, high=2}",
)


def test_dynamic_sampling_goes_on_with_the_groups_it_had_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", here)
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    recipes = []
    for folder in (calm, stormy):
        folder.mkdir()
        recipes.append(write_recipe(folder))
        rows = [{"prompt": word, **({"num_steps": 3, "width": 32} if i % 3 else {})} for i, word in enumerate(WORDS)]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, output = run_to_end(recipes[0], *DYNAMIC, f"prompts.train={calm / 'rows.jsonl'}")
    assert code == 0, output
    rows = metric_rows(calm / "runs" / "run")[1:]
    assert [row["rollout/groups_kept"] for row in rows] == [1.0] * 3
    assert [row["rollout/groups_used"] for row in rows] == [2.0] * 3
    assert sum(row["rollout/filtered/small"] for row in rows) >= 2
    assert [row["rollout/groups_cancelled"] + row["rollout/groups_missing"] for row in rows] == [0.0] * 3
    assert rows[0]["policy/ratio_max_deviation"] == 0.0
    assert rows[1]["policy/ratio_max_deviation"] > 0.0  # one of its groups was made by the weights before

    changed = (*DYNAMIC, f"prompts.train={stormy / 'rows.jsonl'}")
    run = stormy / "runs" / "run"
    process = start_run(recipes[1], *changed)
    _wait_until(lambda: len(metric_rows(run)) > 2 or process.poll() is not None, "two iterations")
    process.kill()
    process.communicate(timeout=60)
    kept = checkpoint.published(run / "checkpoints")[-1]
    assert len(json.loads((kept / "sampled" / "index.json").read_text())) == 1
    payload = next((kept / "sampled").glob("*.msgpack"))
    content = payload.read_bytes()
    payload.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{payload.name} is not what was written"):
        checkpoint.read_state(kept)
    payload.write_bytes(content)
    code, output = run_to_end(recipes[1], *changed)
    assert code == 0, output
    expected, got = final_tensors(calm / "runs" / "run"), final_tensors(run)
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert [learned(row) for row in metric_rows(run)] == [learned(row) for row in metric_rows(calm / "runs" / "run")]


def test_an_asynchronous_run_goes_on_with_what_it_had_sampled_ahead(tmp_path: Path) -> None:
    """Against a run in one process, whose delays are others altogether."""
    small = ("sampling.height=32", "sampling.width=32", "run.iterations=6", "checkpoint.every=2")
    changed = (DECOUPLED, 'schedule={type="async", staleness=2}', *small)
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    for folder in (calm, stormy):
        folder.mkdir()
    run_here(recipe_with(calm, *changed))
    recipe, run = write_recipe(stormy, *changed), stormy / "runs" / "run"
    process = start_run(recipe, *changed)
    try:
        # After the checkpoint of 2: rollouts 2 and 3 stand in it, 4 is at the engine or in the trainer's way.
        _wait_until(lambda: len(metric_rows(run)) > 3 or process.poll() is not None, "three iterations", timeout_s=400)
    finally:
        process.kill()
        process.communicate(timeout=60)
    kept = checkpoint.published(run / "checkpoints")[-1]
    assert {path.name for path in (kept / "ahead").iterdir()} >= {"4"} or kept.name == "step_00000002"
    code, output = run_to_end(recipe, *changed)
    assert code == 0, output
    expected, got = final_tensors(calm / "runs" / "run"), final_tensors(run)
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert [learned(row) for row in metric_rows(run)] == [learned(row) for row in metric_rows(calm / "runs" / "run")]


def test_ctrl_c_saves_and_leaves_nothing(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "runs" / "run"
    process = start_run(recipe, "checkpoint.every=1000", "run.iterations=2000")
    _wait_until(lambda: len(metric_rows(run)) > 3, "some iterations")
    pids = json.loads((run / "processes.json").read_text())
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "the same command goes on from there" in output
    last = metric_rows(run)[-1]["iteration"]
    assert (run / "checkpoints" / f"step_{last:08d}" / "manifest.json").exists()
    _wait_until(lambda: not _alive(pids), "processes of a stopped run ended")


def _alive(pids: dict[str, list[int]]) -> list[int]:
    return [pid for group in pids.values() for pid in group if psutil.pid_exists(pid) and _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
