"""Whole runs by the real command: what they compute, what they refuse, and what they leave behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from cli_fixtures import here
from diffusers import DiffusionPipeline
from run_fixtures import metric_rows, recipe_with, run_to_end, start_run, tiny_model, write_recipe
from run_rewards import PHASES
from test_trace import assert_nested, threads
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from verst.config.recipe import RlRecipe
from verst.engine.resolve import resolve
from verst.engine.wire import GenerateRequest
from verst.engine.worker import Worker
from verst.obs.spans import read_spans
from verst.obs.trace import trace_events
from verst.trainer import checkpoint
from verst.trainer.export import find_checkpoint, load_trained

pytestmark = pytest.mark.ray

MARK = "VERST_TEST_RUN"
LEARN = (
    'model.finetune={type="lora", rank=4, alpha=8.0}',
    "trainer.ranks=2",
    "trainer.lr=1e-2",
    "run.iterations=2",
    "engine.parallel.ulysses=2",
    "cluster.num_cpus=3",
)
SIZE: dict[str, Any] = {"height": 32, "width": 64, "num_inference_steps": 3, "max_sequence_length": 16}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process of a run inherits a mark; after a test none may be left. And tests' rewards can be imported."""
    here_first = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", here_first)
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    deadline = time.monotonic() + 30
    while left := marked_processes(str(tmp_path)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def marked_processes(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                found.append(" ".join(process.cmdline())[:200])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@dataclass
class Finished:
    """One run of two trainer ranks with a LoRA and an engine of two, and what a second driver was told meanwhile."""

    recipe: RlRecipe
    recipe_path: Path
    run: Path
    second: tuple[int, str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("run")
    path, run = write_recipe(folder, *LEARN), folder / "runs" / "run"
    process = start_run(path, *LEARN)
    while not (run / "run.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    second = run_to_end(path, *LEARN)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return Finished(recipe=recipe_with(folder, *LEARN), recipe_path=path, run=run, second=second)


def test_two_ranks_agree_with_the_engine_to_the_bit(finished: Finished) -> None:
    rows = metric_rows(finished.run)
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["policy/ratio_max_deviation"] == 0.0
        assert row["policy/log_prob_max_difference"] == 0.0
        assert row["train/grad_norm"] > 0.0
        assert row["train/pairs"] == 2 * 4 * 2
        assert row["sync/tensors"] == 30
        assert (row["reward/num_masked"], row["reward/num_failures"]) == (0, 0)


def test_where_the_time_went_is_seen_in_a_trace_and_said_in_words(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = threads(list(trace_events(read_spans(finished.run))))
    for slices in found.values():
        assert_nested(slices)
    lanes = {("driver", "phases"), ("trainer", "trainer 0"), ("engine 0", "device"), ("engine 0", "requests")}
    assert lanes | {("parser", "parser 0"), ("reward jpeg_size", "jpeg_size 0")} <= set(found)
    assert {e["name"] for e in found["engine 0", "device"]} == {"encode", "denoise", "decode", "ship"}
    assert here(monkeypatch, "triage", finished.run) == 0
    said = capsys.readouterr().out
    assert "1 iterations of" in said  # of two, the first is not counted
    assert "The run is bound by" in said


def test_second_driver_is_refused(finished: Finished) -> None:
    code, output = finished.second
    assert code == 2
    assert f"{finished.run} is in use by another verst process" in output


def test_complete_run_says_so_and_starts_nothing(finished: Finished) -> None:
    before = (finished.run / "processes.json").stat().st_mtime_ns
    code, output = run_to_end(finished.recipe_path, *LEARN)
    assert code == 0
    assert f"{finished.run} is complete: 2 iterations, held-out reward" in output
    assert "`--if-complete new` starts it anew" in output
    assert (finished.run / "processes.json").stat().st_mtime_ns == before


def test_another_recipe_in_the_same_folder_is_refused(finished: Finished) -> None:
    code, output = run_to_end(finished.recipe_path, *LEARN, "trainer.lr=0.5", "run.seed=4", "run.iterations=9")
    assert code == 2
    assert "holds a run of another recipe (run.seed: 3 -> 4; trainer.lr: 0.01 -> 0.5)" in output
    assert metric_rows(finished.run)[-1]["iteration"] == 2


def engine_picture(finished: Finished, *, trained: bool) -> Tensor:
    """fp32 [3, H, W] of the engine, with what the run has learned or without."""
    worker = Worker(tiny_model())
    if trained:
        load_trained(worker.components.transformer, finished.recipe, find_checkpoint(finished.run, "newest"), ema=False)
    request = GenerateRequest(prompt="a cat", seeds=(5,), guidance_scale=1.0, rollout=False, **SIZE)
    (records,) = worker.generate([resolve(request, worker.components)])
    assert not isinstance(records, Exception)
    return records[0]["generated_output"]


def plain_picture(pipeline: Any) -> Tensor:
    """The same by plain diffusers."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(5)
    images: Tensor = pipeline("a cat", guidance_scale=1.0, generator=generator, output_type="pt", **SIZE).images
    return images[0]


def test_exported_lora_is_what_the_run_learned(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here(monkeypatch, "export", finished.run, tmp_path / "lora") == 0
    assert [p.name for p in (tmp_path / "lora").iterdir()] == ["pytorch_lora_weights.safetensors"]
    pipeline: Any = DiffusionPipeline.from_pretrained(tiny_model())
    untrained = plain_picture(pipeline)
    assert (untrained - engine_picture(finished, trained=False)).abs().max() <= 1e-5
    pipeline.load_lora_weights(tmp_path / "lora")
    trained = engine_picture(finished, trained=True)
    assert (plain_picture(pipeline) - trained).abs().max() <= 1e-5
    assert (trained - untrained).abs().max() > 1e-3
    assert here(monkeypatch, "export", finished.run, tmp_path / "lora") == 2  # never over something else


def test_exported_pipeline_is_what_the_run_learned(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here(monkeypatch, "export", finished.run, tmp_path / "model", "--what", "pipeline") == 0
    pipeline: Any = DiffusionPipeline.from_pretrained(tmp_path / "model")
    assert (plain_picture(pipeline) - engine_picture(finished, trained=True)).abs().max() <= 1e-5
    assert not list(tmp_path.glob(".model*"))


def test_evaluation_of_the_run_repeats_its_last_reading(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (0, 2):
        target = (finished.recipe_path, *LEARN) if step == 0 else (finished.run,)
        assert here(monkeypatch, "eval", *target) == 0
        value = float(capsys.readouterr().out.split("reward/heldout: ")[1].split()[0])
        assert value == pytest.approx(metric_rows(finished.run)[step]["reward/heldout"], rel=1e-4)


def test_damaged_newest_checkpoint_is_refused_by_name(finished: Finished) -> None:
    """The last test of that run: it leaves it damaged."""
    before = (finished.run / "processes.json").stat().st_mtime_ns
    newest = finished.run / "checkpoints" / "step_00000002"
    file = next((newest / "tensors").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, output = run_to_end(finished.recipe_path, *LEARN, "run.iterations=3")
    assert code == 2
    assert f"CheckpointError: {file} is not what was written (checksum differs)" in output
    assert "Remove that checkpoint folder" in output
    assert metric_rows(finished.run)[-1]["iteration"] == 2
    assert (finished.run / "processes.json").stat().st_mtime_ns == before  # nothing was started for it


def trained_weights(folder: Path, scratch: Path) -> dict[str, Tensor]:
    dcp_to_torch_save(folder / "tensors", scratch)
    tensors: dict[str, Tensor] = torch.load(scratch)
    return {name: value for name, value in tensors.items() if name.startswith("model.")}


def test_learning_rate_of_zero_leaves_heldout_reward_as_it_was(tmp_path: Path) -> None:
    rewards = 'rewards=[{type="jpeg_size"}, {type="brightness", weight=0.0}]'
    code, output = run_to_end(write_recipe(tmp_path), "trainer.lr=0.0", "run.iterations=2", "eval.every=1", rewards)
    assert code == 0, output
    rows = metric_rows(tmp_path / "runs" / "run")
    assert len({row["reward/heldout"] for row in rows}) == 1
    assert len({row["reward/heldout/brightness"] for row in rows}) == 1
    assert rows[0]["reward/heldout"] == rows[0]["reward/heldout/jpeg_size"] < 0
    assert len({row["reward/train_mean"] for row in rows[1:]}) == 2  # rollouts themselves differ
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])


def test_constant_failing_and_missing_scores_are_masked_counted_and_never_trained_on(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    reward = '{type="python", path="run_rewards:Scripted", name="scripted", on_failure="mask", '
    reward += f'options={{calls="{calls}"}}}}'
    code, output = run_to_end(write_recipe(tmp_path), f"rewards=[{reward}]", "run.iterations=4", "checkpoint.keep=9")
    assert code == 0, output
    run = tmp_path / "runs" / "run"
    constant, failed, missing, flaky = metric_rows(run)[1:]
    assert calls.read_text().splitlines() == [name for name, count in PHASES.items() for _ in range(count)]

    assert (constant["reward/train_mean"], constant["rollout/zero_variance_groups"]) == (0.5, 2)
    assert (failed["reward/num_failures"], failed["reward/num_masked"]) == (8, 8)
    assert failed["reward/train_mean"] is None  # no score is no 0
    assert failed["reward/scripted/mean"] is None
    for row in (constant, failed):
        assert row["train/skipped_steps"] == 1
        assert "train/loss" not in row
    assert (missing["reward/num_failures"], missing["reward/num_masked"]) == (0, 1)
    assert missing["train/pairs"] == (8 - 1) * 2
    assert missing["reward/train_mean"] > 0
    assert (flaky["reward/num_failures"], flaky["reward/num_masked"]) == (0, 0)  # failed twice, asked again
    assert flaky["train/pairs"] == 8 * 2
    for row in (missing, flaky):
        assert row["train/skipped_steps"] == 0
        assert row["policy/ratio_max_deviation"] == 0.0

    steps = [trained_weights(folder, tmp_path / "w.pt") for folder in checkpoint.published(run / "checkpoints")]
    assert len(steps) == 4
    initial = Worker(tiny_model()).components.transformer.state_dict()
    for name, value in steps[0].items():
        assert torch.equal(value, initial[name.removeprefix("model.transformer.")])
        assert torch.equal(value, steps[1][name])
    assert any(not torch.equal(value, steps[2][name]) for name, value in steps[1].items())
    assert any(not torch.equal(value, steps[3][name]) for name, value in steps[2].items())
    assert "9 samples had no reward and were left out" in output


def refused(folder: Path, *overrides: str) -> str:
    """What a run says that ends with exit code 2; one paragraph, no traceback."""
    code, output = run_to_end(write_recipe(folder), *overrides)
    assert code == 2, output
    assert "Traceback" not in output
    return output


def test_failing_reward_stops_the_run_and_is_named(tmp_path: Path) -> None:
    reward = '{type="python", path="run_rewards:broken", name="judge", attempts=2}'
    output = refused(tmp_path, f"rewards=[{reward}]")
    assert "RewardError: reward judge failed 2 times, last: RuntimeError: the judge is out" in " ".join(output.split())
    assert metric_rows(tmp_path / "runs" / "run") == []


def test_reward_that_cannot_be_imported_is_named_before_any_process_starts(tmp_path: Path) -> None:
    output = refused(tmp_path, 'rewards=[{type="python", path="run_rewards:missing", name="judge"}]')
    assert "ConfigError: rewards.0.path = 'run_rewards:missing' cannot be imported" in output
    assert "starting Ray" not in output


def test_prompt_that_is_too_long_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    prompt = "a very long prompt " * 3
    (tmp_path / "long.txt").write_text(f"a cat\n{prompt}\n")
    output = refused(tmp_path, f'prompts.train="{tmp_path / "long.txt"}"')
    assert "PromptError: 1 prompts do not fit the text encoders" in output
    assert repr(prompt.strip()) in output
    assert "which takes 24" in output
    assert metric_rows(tmp_path / "runs" / "run") == []


def test_port_in_use_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output = refused(tmp_path, f"engine.port={port}")
    assert f"engine.port = {port} is in use on 127.0.0.1: choose another engine.port, or 0 for any free one" in output
