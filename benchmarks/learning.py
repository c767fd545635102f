"""Does each algorithm learn? The glyph recipes over several seeds, against the same recipes with a learning rate of 0.

python benchmarks/learning.py [--algorithms NAME ...] [--seeds 7 8 9] [--jobs N] [--cores N] [--resume] [--out FILE] [--plot FILE]

Runs `verst train` on recipes/glyphs_<name>.toml once for each seed, N jobs at a time, each bound to its own cores (Linux).
A seed decides prompts, noise and step windows; the held-out prompts and their noise are always the same. `control` is
glyphs_grpo with trainer.lr = 0. Writes every held-out curve, mean and spread to benchmarks/results/learning.json, draws
docs/images/learning.png, and exits 1 where an algorithm misses its bound. Flow-GRPO and NFT run their whole recipe; the
others, which only have to rise, run 40 iterations of theirs. With --resume, runs that are whole in --runs are not made
again; with --redraw only the picture is.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learning.json"
PICTURE = ROOT / "docs" / "images" / "learning.png"
Curves = dict[tuple[str, int], list[tuple[int, float]]]
"""(case, seed) -> [(iteration, held-out value)]."""
PACKAGES = ("torch", "diffusers", "transformers", "ray", "onnxruntime")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One recipe, what it is judged by, and what its mean over seeds must reach."""

    recipe: str
    label: str
    metric: str = "reward/heldout"
    overrides: tuple[str, ...] = ()
    at_least: float | None = None
    """Bound of the mean of the last values; None: no bound of its own."""
    gain: float = 0.0
    """Smallest rise of the mean from first to last value."""
    unchanged: bool = False
    """The control: last and first value of every seed must be equal."""
    lower_is_better: bool = False
    iterations: int = 40
    """Of a run; the schedule of the learning rate ends there."""


CASES: dict[str, Case] = {
    "control": Case(recipe="glyphs_grpo", label="lr = 0", overrides=("trainer.lr=0.0",), unchanged=True),
    "flow_grpo": Case(recipe="glyphs_grpo", label="Flow-GRPO", at_least=0.80, iterations=120),
    "async": Case(recipe="glyphs_grpo_async", label="Flow-GRPO, asynchronous", gain=0.1),
    "nft": Case(recipe="glyphs_nft", label="DiffusionNFT", at_least=0.93, iterations=160),
    "guard": Case(recipe="glyphs_guard", label="GRPO-Guard", gain=0.1),
    "fast": Case(recipe="glyphs_fast", label="Flow-GRPO-Fast", gain=0.1),
    "mix": Case(recipe="glyphs_mix", label="MixGRPO", gain=0.1),
    "dance": Case(recipe="glyphs_dance", label="DanceGRPO", gain=0.1),
    "cps": Case(recipe="glyphs_cps", label="CPS", gain=0.1),
    "awm": Case(recipe="glyphs_awm", label="AWM", gain=0.1),
    "dpo": Case(recipe="glyphs_dpo", label="online DPO", gain=0.1),
    "online_sft": Case(recipe="glyphs_online_sft", label="online SFT", gain=0.1),
}


def main() -> None:
    options = _options()
    if not options.redraw:
        measure(options)
    record = json.loads(options.out.read_text(encoding="utf-8"))
    draw(record, options.plot)
    missed = [line for name, case in record["cases"].items() for line in misses(name, case)]
    print("\n".join(missed) or "every algorithm reached its bound")
    sys.exit(1 if missed else 0)


def measure(options: argparse.Namespace) -> None:
    """All runs; the results so far are written after each. Raises CalledProcessError where one fails."""
    slots: queue.Queue[list[int]] = queue.Queue()
    cores = sorted(os.sched_getaffinity(0))
    jobs = options.jobs or max(1, len(cores) // options.cores)
    for job in range(jobs):
        slots.put([cores[(job * options.cores + i) % len(cores)] for i in range(options.cores)])
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        runs = {
            (name, seed): pool.submit(run, name, CASES[name], seed, slots, options)
            for name in options.algorithms
            for seed in options.seeds
        }
        keys, curves = {future: key for key, future in runs.items()}, {}
        for future in concurrent.futures.as_completed(keys):
            curves[keys[future]] = future.result()
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(record_of(curves, options), indent=1) + "\n", encoding="utf-8")


def record_of(curves: Curves, options: argparse.Namespace) -> dict[str, Any]:
    """The results, as far as they are there."""
    by_case: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for (name, seed), curve in sorted(curves.items()):
        by_case.setdefault(name, {})[str(seed)] = curve
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"processor": _processor(), "cores_of_a_run": options.cores, "system": platform.system()},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "heldout": "the first 64 strings of data/glyphs/heldout.txt, fixed noise, ODE",
        "overrides": options.set,
        "cases": {name: summary(name, by_case[name]) for name in options.algorithms if name in by_case},
    }


def run(
    name: str, case: Case, seed: int, slots: queue.Queue[list[int]], options: argparse.Namespace
) -> list[tuple[int, float]]:
    """[(iteration, held-out value)] of one run."""
    folder = options.runs / name / str(seed)
    if options.resume and (curve := curve_of(folder, case)) and curve[-1][0] == case.iterations:
        return curve
    mine = slots.get()
    command = [
        sys.executable,
        "-m",
        "verst.cli.main",
        "train",
        str(ROOT / "recipes" / f"{case.recipe}.toml"),
        "--quiet",
    ]
    command += [f"run.seed={seed}", f"run.name={case.recipe}", f"run.folder={folder}", *case.overrides, *options.set]
    command += [f"run.iterations={case.iterations}"]
    try:
        log = folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            subprocess.run(
                command, check=True, cwd=ROOT, stdout=out, stderr=out, preexec_fn=lambda: os.sched_setaffinity(0, mine)
            )
    finally:
        slots.put(mine)
    curve = curve_of(folder, case)
    print(f"{name} seed {seed}: {curve[0][1]:.3f} -> {curve[-1][1]:.3f}", flush=True)
    return curve


def curve_of(folder: Path, case: Case) -> list[tuple[int, float]]:
    """The held-out curve so far of the run below `folder`; empty where there is none."""
    metrics = folder / case.recipe / "metrics.jsonl"
    if not metrics.exists():
        return []
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [(row["iteration"], row[case.metric]) for row in rows if case.metric in row]


def summary(name: str, curves: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    case = CASES[name]
    first, last = [c[0][1] for c in curves.values()], [c[-1][1] for c in curves.values()]
    return {
        "label": case.label,
        "recipe": f"recipes/{case.recipe}.toml",
        "metric": case.metric,
        "first": round(statistics.fmean(first), 4),
        "last_mean": round(statistics.fmean(last), 4),
        "last_std": round(statistics.stdev(last), 4) if len(last) > 1 else None,
        "last": [round(value, 4) for value in last],
        "best_mean": round(statistics.fmean(max(v for _, v in c) for c in curves.values()), 4),
        "curves": {seed: [[i, round(v, 4)] for i, v in curve] for seed, curve in curves.items()},
    }


def misses(name: str, result: dict[str, Any]) -> list[str]:
    """One line for each bound that a case missed."""
    case = CASES[name]
    if case.unchanged:
        moved = [value for value in result["last"] if abs(value - result["first"]) > 1e-9]
        return [f"{name}: the held-out value moved from {result['first']} to {moved}"] if moved else []
    lines = []
    rise = (result["first"] - result["last_mean"]) if case.lower_is_better else (result["last_mean"] - result["first"])
    if case.at_least is not None and round(result["last_mean"], 2) < case.at_least:
        lines.append(f"{name}: mean of the last held-out values {result['last_mean']} is below {case.at_least}")
    if rise < case.gain:
        lines.append(f"{name}: the held-out value went from {result['first']} to {result['last_mean']}")
    return lines


def draw(record: dict[str, Any], path: Path) -> None:
    """Mean over seeds, and the range between the lowest and the highest, of every case judged by the same metric."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for case in record["cases"].values():
        if case["metric"] != "reward/heldout":
            continue
        curves = [dict(map(tuple, curve)) for curve in case["curves"].values()]
        steps = sorted(set.intersection(*map(set, curves)))
        columns = [[curve[step] for curve in curves] for step in steps]
        (line,) = axes.plot(steps, [statistics.fmean(c) for c in columns], marker="o", ms=3, label=case["label"])
        axes.fill_between(
            steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.12, color=line.get_color()
        )
    axes.set(xlabel="iteration", ylabel="held-out OCR reward", title="Glyph recipes, mean and range over seeds")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[7, 8, 9])
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time; 0 = as many as the cores hold")
    parser.add_argument("--cores", type=int, default=2, help="cores of one run")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning", help="folder of the runs")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides for every recipe")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, default=PICTURE)
    parser.add_argument("--resume", action="store_true", help="keep the whole runs of --runs")
    parser.add_argument("--redraw", action="store_true", help="only draw what --out holds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
