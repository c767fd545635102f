"""Estimated against measured memory of training steps at real size on one GPU, in less than four minutes.

python benchmarks/memory.py [--small --device cpu] [--only TEXT] [--budget-s 220] [--out FILE]

SD3.5-medium and Qwen-Image by their released sizes, random weights built on the device, random data, no guidance, FSDP2
over one rank. Each row is built anew, estimated from shapes (what `verst plan --memory` prints), and takes two optimizer
steps, of which the second is timed; the peak is torch.cuda.max_memory_allocated over both. Full fine-tuning of all 60
blocks of Qwen-Image needs 330 GB of masters, gradients and moments, which neither one H200 nor the 128 GiB beside it
hold: the rows of offloading have fewer blocks, as they say. `--small --device cpu` runs the same code; its figures mean
nothing. A budget that ends leaves rows out, which are named.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_size
import torch
from accelerate import init_empty_weights
from torch import nn

from verst.config.sections import OffloadConfig, TrainerConfig
from verst.families.skeleton import Skeletons
from verst.trainer.core import TileLoss, Trainer
from verst.trainer.estimate import Copies, HeldGradient, Sizes, host_of, peak_of, trainer_items
from verst.trainer.footprint import inputs_of, trace_tile
from verst.trainer.parallel import join_mesh, leave_mesh, open_store, shard
from verst.trainer.recompute import recompute_blocks
from verst.types import Conditioning, Latents
from verst.weights.lora import LoraSpec, attach_lora

import diffusers  # isort: skip  (after verst.families, which makes a torchvision built for another torch importable)

DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    lora: bool
    rows: int
    """Of a tile."""
    checkpointing: str = "none"
    tiles: int = 1
    layers: int | None = None
    """Blocks; None = all."""
    offload: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        parts = [self.case, "LoRA 32" if self.lora else "full", f"{self.tiles} x {self.rows} rows", self.checkpointing]
        parts += [f"{self.layers} blocks"] if self.layers else []
        return ", ".join(parts + [f"offload {what}" for what in self.offload])


_SD3 = functools.partial(Row, case="sd3.5-medium")
_QWEN = functools.partial(Row, case="qwen-image")
ROWS = (
    _SD3(lora=True, rows=8),
    _SD3(lora=True, rows=8, checkpointing="selective"),
    _SD3(lora=True, rows=8, checkpointing="full"),
    _SD3(lora=True, rows=16),
    _SD3(lora=False, rows=8),
    _SD3(lora=False, rows=8, checkpointing="full", tiles=2),
    _QWEN(lora=True, rows=1),
    _QWEN(lora=True, rows=4, checkpointing="full"),
    _QWEN(lora=False, rows=4, checkpointing="full", layers=6),
    _QWEN(lora=False, rows=4, checkpointing="full", layers=6, offload=("optimizer",)),
    _QWEN(lora=False, rows=4, checkpointing="full", layers=6, offload=("parameters",)),
)
SMALL: dict[str, dict[str, Any]] = {
    "sd3.5-medium": {"num_layers": 2, "num_attention_heads": 4, "caption_projection_dim": 256},
    "qwen-image": {"num_layers": 2, "num_attention_heads": 4},
}
"""Of a trial on a CPU."""


def config_of(row: Row) -> TrainerConfig:
    offload = OffloadConfig(**dict.fromkeys(row.offload, True))
    return TrainerConfig(tile_size=row.rows, activation_checkpointing=row.checkpointing, offload=offload)


def built(row: Row, small: bool) -> nn.Module:
    """On the default device, in bf16."""
    case = real_size.CASES[row.case]
    config = case.config | (SMALL[row.case] if small else {})
    if not small and row.layers:
        config[case.layers_key] = row.layers
    torch.set_default_dtype(DTYPE)
    try:
        torch.manual_seed(0)
        model: nn.Module = getattr(diffusers, case.model)(**config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def ready(row: Row, module: nn.Module) -> None:
    """What is trained asks for gradients; blocks compute again as the row says."""
    family = real_size.CASES[row.case].family
    if row.lora:
        attach_lora(module, LoraSpec(rank=real_size.LORA_RANK, alpha=64.0, targets=family.lora_targets))
    else:
        module.requires_grad_(True)
    every = config_of(row).recompute_every
    if every is not None:
        recompute_blocks(module, family.fsdp_blocks, every=every)


def inputs(row: Row, small: bool, device: torch.device) -> tuple[Any, ...]:
    """Latents, sigmas and conditioning on the device."""
    case = real_size.CASES[row.case]
    geometry = case.small_geometry if small else case.geometry
    one = Conditioning(positive=case.conditioning(1, torch.device("cpu")), negative=None, geometry=geometry)
    x, sigmas, conditioning = inputs_of(case.small if small else case.latents, rows=row.rows, conditioning=one)
    there = Conditioning(
        positive={name: value.to(device) for name, value in conditioning.positive.items()},
        negative=None,
        geometry=geometry,
    )
    return {k: v.to(device) for k, v in x.items()}, {k: v.to(device) for k, v in sigmas.items()}, there


def velocity_of(row: Row, module: nn.Module, given: tuple[Any, ...]) -> functools.partial[Latents]:
    family = real_size.CASES[row.case].family
    return functools.partial(family.velocity, module, *given, guidance_scale=1.0, dtype=DTYPE)


def estimate(row: Row, small: bool) -> dict[str, Any]:
    config, family, skeletons = config_of(row), real_size.CASES[row.case].family, Skeletons()
    start = time.perf_counter()
    with init_empty_weights():
        module = built(row, small)
    skeletons.adopt(module)
    with torch.device("meta"):
        ready(row, module)
    skeletons.fill(module, dtype=DTYPE)
    tile = trace_tile(
        velocity_of(row, module, inputs(row, small, torch.device("cpu"))),
        [p for p in module.parameters() if p.requires_grad],
        skeletons=skeletons,
        fused=True,
        held=HeldGradient(config, tiles=row.tiles, grad_itemsize=4),
    )
    sizes = Sizes.of(module, family.fsdp_blocks, ())
    items = trainer_items(sizes, tile, config, dtype=DTYPE, lora=row.lora, tiles=row.tiles, copies=Copies())
    return {
        "items_gib": {f"{item.name}{' (host)' if item.host else ''}": item.bytes / 2**30 for item in items},
        "saved_for_backward_gib": tile.saved / 2**30,
        "estimate_gib": peak_of(items) / 2**30,
        "estimate_host_gib": host_of(items) / 2**30,
        "estimate_s": time.perf_counter() - start,
    }


def measure(row: Row, small: bool, device: torch.device) -> dict[str, Any]:
    config, family = config_of(row), real_size.CASES[row.case].family
    away = "parameters" in row.offload
    start = time.perf_counter()
    with device:
        module = built(row, small)
    if not row.lora:
        module.float()
    with device:
        ready(row, module)
    for p in module.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    store = open_store("127.0.0.1", 0, rank=0, world_size=1)
    layout = join_mesh(rank=0, world_size=1, store=store, device=device, offload=away)
    try:
        shard(module, blocks=family.fsdp_blocks, mesh=layout.fsdp, compute_dtype=DTYPE, offload=away)
        core = Trainer({"transformer": module}, config, total_steps=2, layout=layout)
        velocity = velocity_of(row, module, inputs(row, small, device))
        build_s = time.perf_counter() - start
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)

        def tile() -> TileLoss:
            return TileLoss(loss=torch.stack([v.pow(2).mean() for v in velocity().values()]).sum() / row.tiles)

        core.step([tile] * row.tiles)
        start = time.perf_counter()
        core.step([tile] * row.tiles)
        if cuda:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None
    finally:
        leave_mesh()
    return {"measured_gib": peak, "s_a_pair": seconds / row.rows / row.tiles, "build_s": build_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="part of the names of the rows to make")
    parser.add_argument("--budget-s", type=float, default=220.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "memory.json")
    arguments = parser.parse_args()
    device, start = torch.device(arguments.device), time.perf_counter()
    results: dict[str, Any] = {"machine": real_size.machine(device), "bound": "estimate within 10 %", "rows": {}}
    results["left_out"] = []
    if arguments.small:
        results["note"] = "two blocks, small latents: figures mean nothing"
    print(f"{'row':62} {'estimate':>9} {'measured':>9} {'ratio':>6} {'s/pair':>7} {'host':>6}")
    for row in (row for row in ROWS if arguments.only in row.name):
        if time.perf_counter() - start > arguments.budget_s:
            results["left_out"].append(row.name)
            continue
        found = estimate(row, arguments.small) | measure(row, arguments.small, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        peak = found["measured_gib"]
        found["ratio"] = ratio = None if peak is None else found["estimate_gib"] / peak
        results["rows"][row.name] = found
        print(
            f"{row.name:62} {found['estimate_gib']:9.2f} {peak or 0:9.2f} {ratio or 0:6.3f} {found['s_a_pair']:7.3f} "
            f"{found['estimate_host_gib']:6.1f}",
            flush=True,
        )
        # Written after each: a machine that is taken away keeps what was measured.
        results["seconds"] = time.perf_counter() - start
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{results['seconds']:.0f} s; left out: {', '.join(results['left_out']) or 'nothing'}")


if __name__ == "__main__":
    main()
