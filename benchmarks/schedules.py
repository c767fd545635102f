"""What an asynchronous schedule saves: one recipe by staleness 0, 1 and 2, against what its stages would allow.

python benchmarks/schedules.py [--recipe FILE] [--iterations 12] [--out FILE] [SECTION.KEY=VALUE ...]

Runs `verst train` once for each staleness, one after the other, and leaves the first iterations out, in which the pipeline
fills. An iteration of staleness 0 should take generate + reward + train + sync; of 1 the longer of generate + reward and
train, and sync; of 2 the longest of the three, and sync, with the stages as the synchronous run had them. That holds where
engine, trainer and rewards each have hardware of their own; what they share makes the prediction a floor. Under four
minutes with the default recipe on idle cores; results go to benchmarks/results/schedules.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
STAGES = ("generate", "reward", "train", "sync")
WAITS = ("wait_for_rollout", "wait_for_training")
WARM_UP = 4
"""Iterations that are left out."""


def main() -> None:
    options = _options()
    rows: list[dict[str, Any]] = []
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores",
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "ray": version("ray")},
        "recipe": options.recipe.name,
        "overrides": options.overrides,
        "iterations": options.iterations - WARM_UP,
        "schedules": rows,
    }
    for staleness in (0, 1, 2):
        seconds = measure(staleness, options)
        predicted = prediction(staleness, rows[0]["median_s"] if rows else seconds)
        row = {"staleness": staleness, "median_s": seconds, "predicted_s": predicted}
        rows.append(row)
        row["speedup"] = rows[0]["median_s"]["iteration"] / seconds["iteration"]
        print(
            f"staleness {staleness}: {seconds['iteration']:.3f} s an iteration, {predicted:.3f} predicted, "
            f"{row['speedup']:.2f} times as fast as synchronous",
            flush=True,
        )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def prediction(staleness: int, synchronous: dict[str, float]) -> float:
    """Seconds of an iteration, from the stages of the synchronous run."""
    generate, reward, train, sync = (synchronous[name] for name in STAGES)
    together = {0: generate + reward + train, 1: max(generate + reward, train), 2: max(generate, reward, train)}
    return together[staleness] + sync


def measure(staleness: int, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of an iteration, its stages and its waits. Raises CalledProcessError where the run fails."""
    with tempfile.TemporaryDirectory(prefix="verst-schedules-") as folder:
        overrides = [
            f'schedule={{type="async", staleness={staleness}}}',
            f"run.iterations={options.iterations}",
            "run.name=run",
            f"run.folder={folder}",
            "eval.every=1000",
            "eval.num_prompts=1",
            "checkpoint.every=1000",
            *options.overrides,
        ]
        command = [sys.executable, "-m", "verst.cli.main", "train", str(options.recipe), "--quiet", *overrides]
        subprocess.run(command, check=True, cwd=ROOT)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # The last iterations begin no rollout any more.
    counted = [json.loads(line) for line in lines][1 + WARM_UP : -staleness or None]
    names = {name: f"perf/{name}_s" for name in ("iteration", *STAGES, *(WAITS if staleness else ()))}
    return {name: statistics.median(row[key] for row in counted) for name, key in names.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "glyphs_grpo_async.toml")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "schedules.json")
    parser.add_argument("overrides", nargs="*", help="of the recipe, for all runs")
    options = parser.parse_args()
    if options.iterations < WARM_UP + 4:
        parser.error(f"--iterations = {options.iterations}: {WARM_UP} are left out and some must be there; at least 8")
    return options


if __name__ == "__main__":
    main()
