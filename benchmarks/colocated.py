"""One GPU for trainer and engine: what sharing the frozen base under a LoRA, and sleeping in turns, save.

python benchmarks/colocated.py [--out FILE] [--small --device cpu]

A random SD3.5-medium (released size of the transformer, bf16, LoRA r = 32, 512 x 512, 8 samples a microgroup; tiny text
encoders and autoencoder) is trained by verst's own trainer and sampled by its own engine worker, each in a process of
its own: rollout, two updates with activation checkpointing, sync, rollout. Memory is what the device has in use, as
the trainer's process sees it every 20 ms (cudaMemGetInfo: contexts, caches and the other process included), less what was
in use before. Goal: trainer and engine with one base take at most 1.1 x the trainer alone. About three minutes;
JSON is written after every setting. `--small --device cpu` runs the same code on a tiny model, to try it.
"""

from __future__ import annotations

import argparse
import functools
import json
import pickle
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.multiprocessing as mp
from real_size import SD35_MEDIUM

from verst.config import RlRecipe, parse_recipe
from verst.engine.worker import Worker
from verst.families.tiny import build_tiny
from verst.flow.determinism import make_deterministic
from verst.loops.batch import make_batch
from verst.loops.matrix import one_rank, sample_groups
from verst.weights.manifest import verify

import diffusers  # isort: skip  (after verst.families, which makes a torchvision built for another torch importable)

GOAL = 1.1
SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Which of the two processes there are, and how they share the device."""

    engine: bool = True
    share_base: bool = False
    sleep: bool = False
    """The engine gives weights and caches back while the trainer trains, the trainer its cache while the engine samples."""


SETTINGS = {
    "trainer alone": Setting(engine=False),
    "own base each": Setting(),
    "one base": Setting(share_base=True),
    "one base, sleeping in turns": Setting(share_base=True, sleep=True),
}


def write_model(folder: Path, *, small: bool, device: torch.device) -> None:
    """A tiny SD3.5 whose transformer has the released size, but for the width of its text, and latents of 16 channels."""
    build_tiny("sd3.5", folder)
    if small:
        return
    autoencoder = json.loads((folder / "vae" / "config.json").read_text())
    diffusers.AutoencoderKL.from_config({**autoencoder, "latent_channels": 16}).save_pretrained(folder / "vae")
    path = folder / "transformer"
    config = json.loads((path / "config.json").read_text())
    widths = {key: config[key] for key in ("joint_attention_dim", "pooled_projection_dim")}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            torch.manual_seed(0)
            model = diffusers.SD3Transformer2DModel(**SD35_MEDIUM, **widths)
    finally:
        torch.set_default_dtype(torch.float32)
    for file in path.iterdir():
        file.unlink()
    model.to(torch.bfloat16).save_pretrained(path)


def recipe_for(folder: Path, setting: Setting, *, small: bool, device: torch.device) -> RlRecipe:
    prompts = folder.parent / "prompts.txt"
    prompts.write_text("1234\n")
    size = 64 if small else 512
    recipe = parse_recipe(
        {
            "run": {"name": "colocated", "iterations": 2, "device": device.type},
            "model": {
                "path": str(folder),
                "dtype": "float32" if small else "bfloat16",
                "max_sequence_length": 24,
                "finetune": {"type": "lora", "rank": 4 if small else 32},
            },
            "sampling": {
                "height": size,
                "width": size,
                "num_steps": 4,
                "steps": {"type": "window", "size": 1, "high": 3},
            },
            "prompts": {"train": str(prompts), "heldout": str(prompts)},
            "rollout": {"num_groups": 1, "group_size": SAMPLES, "microgroup_size": SAMPLES},
            "rewards": [{"type": "brightness"}],
            "algorithm": {"type": "flow_grpo"},
            "trainer": {"tile_size": SAMPLES, "activation_checkpointing": "full"},
            "sync": {"type": "cuda_ipc" if device.type == "cuda" else "shm"},
            "cluster": {"placement": {"type": "colocated", "share_base": setting.share_base}},
        }
    )
    assert isinstance(recipe, RlRecipe)
    return recipe


class Usage:
    """Bytes of the device in use by anybody, watched from a thread; 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def now(self) -> int:
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.peak = max(self.peak, self.now())

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.peak


def engine_process(pipe: Connection, recipe: RlRecipe, device: str) -> None:
    """Answers (method, argument) until None comes."""
    where = torch.device(device)
    make_deterministic(where)
    worker: Worker | None = None
    while (message := pipe.recv()) is not None:
        method, argument = message
        if method == "load":
            dtype = torch.float32 if recipe.model.dtype == "float32" else torch.bfloat16
            worker = Worker(recipe.model.path, dtype=dtype, device=where, loan=argument)
            pipe.send({"weight_bytes": worker.weight_bytes()})
            continue
        assert worker is not None
        if method == "rollout":
            pipe.send_bytes(pickle.dumps(sample_groups(recipe, worker)))
        elif method == "sync":
            pipe.send(dict(worker.update_from_manifest(argument)))
        elif method == "sleep":
            worker.sleep()
            pipe.send(None)
        elif method == "wake":
            worker.wake()
            pipe.send(None)


def trainer_process(
    pipe: Connection,
    engine: Connection | None,
    recipe: RlRecipe,
    setting: Setting,
    device: str,
    recorded: bytes,
    before: int,
) -> None:
    """The whole of one setting, with the engine at the other end of `engine`; sends the figures."""
    where = torch.device(device)
    usage = Usage(where)

    def ask(method: str, argument: Any = None) -> Any:
        assert engine is not None
        engine.send((method, argument))
        return pickle.loads(engine.recv_bytes()) if method == "rollout" else engine.recv()

    figures: dict[str, Any] = {}
    with one_rank(recipe, device=where) as trainer:
        figures["after_load"] = usage.now() - before
        syncs: list[float] = []

        def sync(version: int) -> None:
            start = time.perf_counter()
            manifest = trainer.publish(version)
            assert manifest is not None
            verify(manifest, ask("sync", manifest), engine="engine")
            syncs.append(time.perf_counter() - start)
            trainer.unpublish()

        if setting.engine:
            figures["engine_weight_bytes"] = ask("load", trainer.lend())["weight_bytes"]
            figures["after_engine"] = usage.now() - before
            sync(0)
        ratios = []
        for version in (1, 2):
            groups = ask("rollout") if setting.engine else pickle.loads(recorded)
            if setting.sleep:
                ask("sleep")
            start = time.perf_counter()
            update = trainer.update(make_batch(recipe, groups).shares[0])
            figures["update_s"] = time.perf_counter() - start
            ratios.append(update.policy["ratio_max_deviation"])
            if setting.sleep:
                if where.type == "cuda":
                    torch.cuda.empty_cache()
                start = time.perf_counter()
                ask("wake")
                figures["wake_s"] = time.perf_counter() - start
            if setting.engine:
                sync(version)
        if setting.engine:
            ask("rollout")
            # Of the trainer alone the samples were made by an engine without a LoRA, whose numbers round otherwise.
            figures["ratio_max_deviation"] = max(ratios)
            for version in range(3, 10):
                sync(version)
            figures["sync_ms"] = statistics.median(syncs[2:]) * 1e3
    figures["peak"] = usage.end() - before
    pipe.send(figures)


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process of its own, with a pipe as its first argument; it has ended when the block is left."""
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(60)
        if process.is_alive():
            process.kill()


def record(recipe: RlRecipe, device: str) -> bytes:
    """A rollout for the trainer alone, by an engine that has ended when the trainer starts."""
    with started(engine_process, recipe, device) as engine:
        engine.send(("load", None))
        engine.recv()
        engine.send(("rollout", None))
        data = engine.recv_bytes()
        engine.send(None)
    return data


def measure(recipe: RlRecipe, setting: Setting, device: str, recorded: bytes) -> dict[str, Any]:
    before = in_use(device)
    run = functools.partial(started, trainer_process)
    if not setting.engine:
        with run(None, recipe, setting, device, recorded, before) as trainer:
            figures: dict[str, Any] = trainer.recv()
        return figures
    with started(engine_process, recipe, device) as engine:
        with run(engine, recipe, setting, device, recorded, before) as trainer:
            figures = trainer.recv()
        engine.send(None)
    return figures


def in_use(device: str) -> int:
    """Of the device by others than us, before any process of ours has a context there."""
    if device == "cpu":
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]) * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="*", choices=sorted(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "colocated.json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    results: dict[str, Any] = {"machine": machine(device), "goal_ratio": GOAL, "settings": {}}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        with started(send_model, folder, arguments.small, arguments.device) as pipe:
            pipe.recv()
        make = functools.partial(recipe_for, folder, small=arguments.small, device=device)
        recorded = record(make(Setting()), arguments.device)
        for name in arguments.only:
            setting = SETTINGS[name]
            row = measure(make(setting), setting, arguments.device, recorded)
            alone = results["settings"].get("trainer alone", row)["peak"]
            row["peak_to_trainer_alone"] = row["peak"] / alone if alone else None
            results["settings"][name] = row
            print(f"{name:30} {json.dumps({k: _short(v) for k, v in row.items()})}", flush=True)
            # Written after each: a machine that is taken away keeps what was measured.
            results["reached"] = reached(results["settings"])
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def reached(settings: dict[str, Any]) -> bool | None:
    """Whether a pair with one base kept to the goal; None before one was measured, or on a CPU."""
    ratios = [row["peak_to_trainer_alone"] for name, row in settings.items() if name.startswith("one base")]
    known = [ratio for ratio in ratios if ratio is not None]
    return min(known) <= GOAL if known else None


def send_model(pipe: Connection, folder: Path, small: bool, device: str) -> None:
    """`write_model` in a process of its own, whose memory is gone afterwards."""
    write_model(folder, small=small, device=torch.device(device))
    pipe.send(None)


def _short(value: Any) -> Any:
    return f"{value / 2**30:.2f} GiB" if isinstance(value, int) and value > 2**20 else value


def machine(device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
