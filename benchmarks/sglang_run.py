"""Whole Flow-GRPO runs on real SGLang-Diffusion servers: a tiny SD3 in fp32, two servers behind verst's adapters and router.

python benchmarks/sglang_run.py [--iterations 10] [--out FILE]

Needs what `make test-sglang` installs. Runs, one after the other, all from one recipe:

    lora            unmerged pairs
    lora, killed    the same, and one server is killed on the way: the weights at the end must be those of `lora`, bit for bit
    full            all weights, as whole tensors
    recompute       as lora; old log-probs are the trainer's own
    native          as lora, on verst's own engine

Of each: the largest distance of the ratio from 1 before an update, pictures a second of the rollouts, seconds of a hand-over
with its proof, and what supervision did. Two CPU cores of a shared machine: the seconds are of one kind only beside each other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import tomli_w
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from verst.families.tiny import build_tiny
from verst.trainer import checkpoint

ROOT = Path(__file__).parents[1]
SGLANG = ROOT / "build" / "sglang" / "venv" / "bin" / "sglang"
SITE = ROOT / "tests" / "sglang_oracle" / "site"
"""What torchvision's CUDA build needs beside a CPU torch, for the server's processes."""
GROUPS, GROUP_SIZE = 2, 4
WORDS = ("a red cat", "a blue dog", "two birds", "a green tree", "a house at night", "a small robot")
LORA = {"model.finetune": {"type": "lora", "rank": 4, "alpha": 8.0}}
KINDS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora, killed": LORA,
    "full": {},
    "recompute": {**LORA, "algorithm.old_log_probs": "recompute"},
    "native": {**LORA, "engine": {"num": 2, "router": {"enabled": True}}},
}
KILLED_AFTER = 3
"""Iterations."""


def tables(folder: Path, model: Path, iterations: int, changes: dict[str, Any]) -> dict[str, Any]:
    (folder / "train.txt").write_text("\n".join(WORDS))
    (folder / "heldout.txt").write_text("a yellow bus\na big dog\n")
    recipe: dict[str, Any] = {
        "run": {
            "name": "run",
            "folder": str(folder),
            "seed": 3,
            "iterations": iterations,
            "threads": 1,
            "device": "cpu",
        },
        "model": {"path": str(model), "max_sequence_length": 256},
        "sampling": {
            "height": 32,
            "width": 64,
            "num_steps": 4,
            "guidance_scale": 4.0,
            "negative_prompt": "a dog",
            "steps": {"type": "window", "size": 2, "low": 0, "high": 3},
        },
        "prompts": {"train": str(folder / "train.txt"), "heldout": str(folder / "heldout.txt")},
        "rollout": {"num_groups": GROUPS, "group_size": GROUP_SIZE, "microgroup_size": 2},
        "rewards": [{"type": "jpeg_size"}],
        "algorithm": {"type": "flow_grpo"},
        "trainer": {"tile_size": 2, "lr": 1e-3},
        "engine": {
            "type": "sglang",
            "num": 2,
            "executable": str(SGLANG),
            "environment": {"PYTHONPATH": str(SITE)},
            "router": {"enabled": True},
        },
        "checkpoint": {"every": 1, "keep": 2},
        "eval": {"every": 100, "num_prompts": 2, "batch_size": 2, "grid": 2},
        "cluster": {"num_cpus": 4},
        "trackers": {"tensorboard": False},
    }
    for key, value in changes.items():
        table, _, leaf = key.rpartition(".")
        (recipe[table] if table else recipe)[leaf] = value
    return recipe


def run(kind: str, folder: Path, model: Path, iterations: int) -> dict[str, Any]:
    """Raises RuntimeError with the output of a run that failed."""
    folder.mkdir(parents=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(tomli_w.dumps(tables(folder, model, iterations, KINDS[kind])))
    output = folder / "output.txt"
    with output.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "verst.cli.main", "train", str(recipe)],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "RAY_ADDRESS": "127.0.0.1:9"},
        )
        killed = _kill_a_server(process, folder) if "killed" in kind else None
        code = process.wait()
    if code:
        raise RuntimeError(f"{kind} ended with {code}:\n{output.read_text()[-4000:]}")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/ratio_max_deviation" in row]
    return {
        "iterations": len(steps),
        "ratio_max_deviation": max(row["policy/ratio_max_deviation"] for row in steps),
        "log_prob_max_difference": max(row["policy/log_prob_max_difference"] for row in steps),
        "images_per_s": GROUPS * GROUP_SIZE / statistics.median(row["perf/rollout_s"] for row in steps),
        "sync_s": statistics.median(row["perf/sync_s"] for row in steps),
        "reward_first_last": [steps[0]["reward/train_mean"], steps[-1]["reward/train_mean"]],
        "killed": killed,
        "reissued": sum(row.get("supervision/reissued", 0.0) for row in rows),
        "samples": _samples(folder / "run"),
        "output": output.read_text(),
    }


def _samples(folder: Path) -> int:
    """That were trained on, each once. Raises RuntimeError for one that came twice."""
    keys = [
        (record["iteration"], group["rollout"], group["group"], index)
        for record in map(json.loads, (folder / "trained.jsonl").read_text().splitlines())
        for group in record["groups"]
        for index in group["indices"]
    ]
    if len(set(keys)) != len(keys):
        raise RuntimeError("a sample was trained on twice in one iteration")
    return len(keys)


def _kill_a_server(process: subprocess.Popen[bytes], folder: Path) -> int:
    """The server's process id, once enough iterations are done."""
    metrics = folder / "run" / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") > KILLED_AFTER:
            break
        time.sleep(0.05)
    guards = [p for p in psutil.Process(process.pid).children(recursive=True) if _is_guard(p)]
    (server, *_) = guards[0].children()
    server.send_signal(signal.SIGKILL)
    return server.pid


def _is_guard(process: psutil.Process) -> bool:
    try:
        return any(part.endswith("sglang/guard.py") for part in process.cmdline())
    except psutil.Error:
        return False


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    newest = checkpoint.published(folder / "run" / "checkpoints")[-1]
    with tempfile.TemporaryDirectory() as place:
        dcp_to_torch_save(newest / "tensors", Path(place) / "all.pt")
        tensors: dict[str, torch.Tensor] = torch.load(Path(place) / "all.pt")
    return {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "sglang_run.json")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="verst-sglang-run-") as place:
        model = build_tiny("sd3.5", Path(place) / "model")
        for kind in KINDS:
            result = run(kind, Path(place) / kind.replace(", ", "_"), model, args.iterations)
            del result["output"]
            results[kind] = result
            print(f"{kind:14s} {json.dumps(result)}", flush=True)
        undisturbed, disturbed = (final_tensors(Path(place) / name) for name in ("lora", "lora_killed"))
        same = undisturbed.keys() == disturbed.keys() and all(
            torch.equal(t, disturbed[name]) for name, t in undisturbed.items()
        )
    (wheel,) = (ROOT / "build" / "sglang" / "wheel").glob("sglang-*.dist-info")
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/sglang_run.py",
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "sglang": wheel.name.removeprefix("sglang-").removesuffix(".dist-info"),
        },
        "model": "tiny SD3.5, random weights, fp32, 32 x 64, 4 steps, guidance 4",
        "servers": 2,
        "runs": results,
        "weights_of_the_disturbed_run_are_the_undisturbed_ones": same,
        "tensors_compared": len(undisturbed),
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in list(report)[-2:]}))


if __name__ == "__main__":
    main()
