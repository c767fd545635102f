"""A small RL run on a tiny random SD3, for tests that start the real command."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w
import torch

from verst.config import load_recipe
from verst.config.recipe import RlRecipe
from verst.families.tiny import build_tiny
from verst.trainer import checkpoint

WORDS = (
    "a red cat",
    "a blue dog",
    "two birds",
    "a green tree",
    "a house at night",
    "a small robot",
    "a car",
    "a street",
)


@functools.cache
def tiny_model() -> Path:
    """One tiny SD3 for the whole test session."""
    folder = Path(tempfile.mkdtemp(prefix="verst-test-model-")) / "tiny"
    build_tiny("sd3", folder)
    return folder


def base_tables(folder: Path) -> dict[str, Any]:
    """The recipe as tables; prompts and run folder inside `folder`."""
    (folder / "train.txt").write_text("\n".join(WORDS))
    (folder / "heldout.txt").write_text("a yellow bus\na big dog\n")
    return {
        "run": {
            "name": "run",
            "folder": str(folder / "runs"),
            "seed": 3,
            "iterations": 3,
            "threads": 1,
            "device": "cpu",
        },
        "model": {"path": str(tiny_model()), "max_sequence_length": 24},
        "sampling": {
            "height": 64,
            "width": 64,
            "num_steps": 4,
            "shared_initial_noise": True,
            "steps": {"type": "window", "size": 2, "low": 0, "high": 3},
        },
        "prompts": {"train": str(folder / "train.txt"), "heldout": str(folder / "heldout.txt")},
        "rollout": {"num_groups": 2, "group_size": 4, "microgroup_size": 2},
        "rewards": [{"type": "jpeg_size"}],
        "algorithm": {"type": "flow_grpo"},
        "trainer": {"tile_size": 2, "lr": 1e-3},
        "checkpoint": {"every": 1, "keep": 2},
        "eval": {"every": 100, "num_prompts": 2, "batch_size": 2, "grid": 2},
        "cluster": {"num_cpus": 2},
    }


def write_recipe(folder: Path, *overrides: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(base_tables(folder)))
    load_recipe(path, overrides)
    return path


def recipe_with(folder: Path, *overrides: str) -> RlRecipe:
    recipe = load_recipe(write_recipe(folder, *overrides), overrides)
    assert isinstance(recipe, RlRecipe)
    return recipe


def start_run(recipe: Path, *overrides: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    """`verst train` in a process of its own, with its own session, as a shell would start it."""
    return subprocess.Popen(
        [sys.executable, "-m", "verst.cli.main", "train", str(recipe), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        start_new_session=True,
        # A run without cluster.address has a Ray of its own, whatever cluster the machine knows of.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "RAY_ADDRESS": "127.0.0.1:9"},
    )


def run_to_end(recipe: Path, *overrides: str, timeout_s: float = 300.0) -> tuple[int, str]:
    """Exit code and output of a whole run."""
    process = start_run(recipe, *overrides)
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def final_tensors(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint: weights, optimizer, counters."""
    newest = checkpoint.published(run / "checkpoints")[-1]
    checkpoint.read_state(newest)
    return checkpoint.all_tensors(newest)


def metric_rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def learned(row: dict[str, Any]) -> dict[str, Any]:
    """A metrics line without what the clock and killed processes decide."""
    return {key: value for key, value in row.items() if not key.startswith(("perf/", "supervision/"))}
