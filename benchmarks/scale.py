"""What one microgroup costs the driver, in rollouts of 100, 1,000 and 10,000 of them.

python benchmarks/scale.py [--sizes 100,1000,10000] [--repeats 3] [--queue-size 16] [--profile FILE] [--out FILE]

Engines without a model (`fake_engines`, in processes of their own) answer at once, and a reward says one number: what is
left is the control plane. All of it is real and in one process, as in a run: plan, requests over HTTP, answers in shared
memory, echo checks, groups, filters, reward calls, spans on disk. Answers are decoded here and not in parser processes,
whose cost is Ray's. Overhead is the CPU time of the driver's process for a microgroup; the load of the machine moves it less
than seconds, but it does: each size is measured several times, in turns, and the least counts. Memory is what the process
holds at the end of a rollout, all samples included, above what it held before; of several runs the most, since a later
one finds memory that an earlier one has left.

Engines take `--queue-size` requests each, on as many connections. With 16 all sizes fill them, and what differs is the number
of microgroups alone; with 64 a rollout of 100 microgroups fills two fifths of the places.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import platform
import pstats
import resource
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fake_engines import FakeEngineOptions, FakeEngines
from rollout_harness import LocalParsers, allow_open_files, recipe_of, run_rollout

from verst.config.recipe import RlRecipe
from verst.obs.events import EventLog
from verst.obs.spans import FILE, Spans
from verst.rewards.base import RewardBatch, Score

PREDICTION = {
    "overhead_10000_over_100": 1.2,
    "memory_per_microgroup_10000_over_1000": 1.2,
    "event_bytes_per_microgroup": 4096.0,
}
"""Written down before the first measurement: at most these."""
GROUP_SIZE, MICROGROUP = 16, 4
ENGINES = 4
EVENT_BYTES = 64 * 2**20
"""At which a file of events is begun anew: two of them are what there can be at most."""


async def judge(batch: RewardBatch) -> Sequence[Score]:
    return [float(len(name)) for name in batch.prompts]


def recipe_for(microgroups: int, queue_size: int, folder: Path) -> RlRecipe:
    return recipe_of(
        f"run.folder={folder}",
        f"rollout.num_groups={microgroups * MICROGROUP // GROUP_SIZE}",
        f"rollout.group_size={GROUP_SIZE}",
        f"rollout.microgroup_size={MICROGROUP}",
        f"trainer.tile_size={MICROGROUP}",
        f"engine.num={ENGINES}",
        f"engine.queue_size={queue_size}",
        'rewards=[{type="python", path="a:b", name="judge", workers=4}]',
    )


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def once(
    microgroups: int, queue_size: int, urls: list[str], folder: Path, profile: cProfile.Profile | None
) -> dict[str, float]:
    recipe = recipe_for(microgroups, queue_size, folder)
    events = folder / "events"
    log = EventLog(events / FILE, flush_s=1.0, max_bytes=EVENT_BYTES)
    gc.collect()
    memory, files = resident_bytes(), len(os.listdir("/proc/self/fd"))
    cpu, wall = time.process_time(), time.perf_counter()
    if profile is not None:
        profile.enable()
    rollout, seconds = run_rollout(recipe, urls, LocalParsers(), {"judge": judge}, Spans(log))
    if profile is not None:
        profile.disable()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    held, open_files = resident_bytes() - memory, len(os.listdir("/proc/self/fd")) - files
    assert sum(len(group.samples) for group in rollout.groups) == microgroups * MICROGROUP
    log.close()
    sizes = [path.stat().st_size for path in events.iterdir()]
    for path in events.iterdir():
        path.unlink()
    del rollout
    return {
        "cpu_ms": 1000 * cpu / microgroups,
        "wall_ms": 1000 * seconds / microgroups,
        "held_kb": held / microgroups / 1000,
        "open_files": open_files / microgroups,
        "event_bytes": sum(sizes) / microgroups,
        "event_files": float(len(sizes)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="100,1000,10000")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--queue-size", type=int, default=16)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/scale.json")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    allow_open_files()
    options = FakeEngineOptions(
        number=ENGINES, latency_s=0.0, latent=(4, 8, 8), frames=(1, 32, 32, 3), shared_bytes=2 * 2**30
    )
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    profile = cProfile.Profile() if arguments.profile else None
    with tempfile.TemporaryDirectory() as name:
        for repeat in range(arguments.repeats + 1):
            for size in sizes if repeat else [min(sizes)]:
                # Of their own each time: what an engine's pool has learned must not depend on the order.
                with FakeEngines(options) as engines:
                    result = once(size, arguments.queue_size, engines.urls, Path(name), profile if repeat else None)
                print(f"{size:6} {'' if repeat else '(warm-up) '}{line(result)}", flush=True)
                if repeat:
                    runs[size].append(result)
    if profile is not None:
        stats = pstats.Stats(profile)
        stats.dump_stats(arguments.profile)
        stats.sort_stats("tottime").print_stats(25)
    report(arguments.out, runs, arguments.queue_size)


def line(result: dict[str, float]) -> str:
    return json.dumps({name: float(f"{value:.4g}") for name, value in result.items()})


def report(out: Path, runs: dict[int, list[dict[str, float]]], queue_size: int) -> None:
    least = {
        size: {name: (max if name == "held_kb" else min)(run[name] for run in found) for name in found[0]}
        for size, found in runs.items()
    }
    small, large = least[min(least)], least[max(least)]
    middle = least[sorted(least)[-2]] if len(least) > 1 else large
    measured = {
        "overhead_10000_over_100": large["cpu_ms"] / small["cpu_ms"],
        "memory_per_microgroup_10000_over_1000": large["held_kb"] / middle["held_kb"],
        "event_bytes_per_microgroup": large["event_bytes"],
    }
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "what": "of one microgroup, in the driver's process: CPU time, memory held, bytes of events; the least of the runs, of memory the most",
        "engines": ENGINES,
        "queue_size": queue_size,
        "event_bytes_at_most": 2 * EVENT_BYTES,
        "prediction": PREDICTION,
        "measured": measured,
        "met": {name: measured[name] <= PREDICTION[name] for name in PREDICTION},
        "by_microgroups": least,
        "runs": runs,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'microgroups':>12} {'CPU, ms':>9} {'wall, ms':>9} {'held, kB':>9} {'events, B':>10}")
    for size, found in sorted(least.items()):
        print(
            f"{size:12} {found['cpu_ms']:9.3f} {found['wall_ms']:9.3f} {found['held_kb']:9.1f} {found['event_bytes']:10.0f}"
        )
    print(json.dumps({"prediction": PREDICTION, "measured": measured}))


if __name__ == "__main__":
    main()
