"""One trainer on one GPU and on two: FSDP2, HSDP and Ulysses, LoRA and full, speed and agreement.

python benchmarks/parallel.py [--only NAME ...] [--out FILE] [--device cpu --small --layers 2]

Transformers have random weights of the released size, built on each device from one seed; see benchmarks/real_size.py.
Every layout takes the same optimizer steps on the same pairs: 4 tiles of a recorded microgroup, shared out over the
ranks that see different samples, or cut in tokens by Ulysses. Told are seconds of a step (median after the first), the
speed-up over the first layout (one GPU, where it fits), losses, gradient norms, the relative difference of the trained
weights from that layout's, peak memory of a rank, and whether a second run on one GPU gives the same bits. A layout that
needs more GPUs than there are is left out and named in the JSON. On a CPU (gloo) the figures of speed mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import real_size
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor

from verst.algorithms import make_algorithm
from verst.algorithms.pairs import pair_block, tiles_of
from verst.config.sections import ParallelConfig
from verst.families.sequence import split_sequence
from verst.flow.determinism import make_deterministic
from verst.trainer.core import Trainer
from verst.trainer.parallel import Layout, join_mesh, leave_mesh, open_store, shard
from verst.trainer.recompute import recompute_blocks
from verst.trainer.rl import tile_loss
from verst.types import Conditioning, Geometry
from verst.weights.digest import digest_of
from verst.weights.lora import LoraSpec, adaptable, attach_lora

NUM_TILES = 4
NUM_STEPS = 4
SAMPLED = 1009
"""Of the trained weights every so many-th is compared; a prime, so that no column is always the one."""


@dataclass(frozen=True, kw_only=True)
class Layouts:
    ranks: int
    parallel: ParallelConfig


LAYOUTS = {
    "one GPU": Layouts(ranks=1, parallel=ParallelConfig()),
    "one GPU again": Layouts(ranks=1, parallel=ParallelConfig()),
    "FSDP2": Layouts(ranks=2, parallel=ParallelConfig()),
    "HSDP (2 copies)": Layouts(ranks=2, parallel=ParallelConfig(replicate=2)),
    "Ulysses": Layouts(ranks=2, parallel=ParallelConfig(ulysses=2)),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model, what of it is trained, and the layouts that are compared."""

    case: real_size.Case
    lora: bool
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    recompute: bool = False
    """Every block computes its forward again in the backward."""
    wide: bool = True
    """fp32 masters (`trainer.precision.master`); else what is trained is kept in bf16, Adam's moments too."""


_SD3, _QWEN = real_size.CASES["sd3.5-medium"], real_size.CASES["qwen-image"]
_ONE_AND_TWO = ("one GPU", "FSDP2", "Ulysses")
CASES = {
    "sd3.5-medium LoRA": Measured(case=real_size.CASES["sd3.5-medium"], lora=True),
    "sd3.5-medium full": Measured(case=real_size.CASES["sd3.5-medium"], lora=False),
    # Of 4224 tokens: long enough that cutting them pays.
    "qwen-image LoRA 1024 px": Measured(
        case=replace(_QWEN, samples=2, geometry=Geometry(height=1024, width=1024), latents={"visual": (16, 128, 128)}),
        lora=True,
        layouts=_ONE_AND_TWO,
    ),
    # Work enough for each GPU that its kernels, and not the host that launches them, take the time.
    "sd3.5-medium LoRA 1024 px": Measured(
        case=replace(_SD3, samples=8, geometry=Geometry(height=1024, width=1024), latents={"visual": (16, 128, 128)}),
        lora=True,
        layouts=_ONE_AND_TWO,
    ),
    "qwen-image LoRA 1328 px": Measured(
        case=replace(_QWEN, samples=4, geometry=Geometry(height=1328, width=1328), latents={"visual": (16, 166, 166)}),
        lora=True,
        layouts=_ONE_AND_TWO,
        recompute=True,
    ),
    # 164 GB of weights, gradients and moments: not for one GPU.
    "qwen-image full": Measured(case=replace(_QWEN, samples=2), lora=False, layouts=("FSDP2",), wide=False),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank does; travels to its process."""

    name: str
    layout: str
    port: int
    folder: str
    device: str
    layers: int | None
    small: bool


def rank_main(rank: int, job: Job) -> None:
    """Build, record, train; rank 0 writes what it found."""
    layout = LAYOUTS[job.layout]
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    make_deterministic(device)
    store = open_store("127.0.0.1", job.port, rank=rank, world_size=layout.ranks)
    mesh = join_mesh(rank=rank, world_size=layout.ranks, store=store, device=device, parallel=layout.parallel)
    try:
        found, weights = train(job, rank, layout, mesh, device)
        if rank == 0:
            torch.save(weights, Path(job.folder) / "weights.pt")
            (Path(job.folder) / "found.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        leave_mesh()


def train(
    job: Job, rank: int, layout: Layouts, mesh: Layout, device: torch.device
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    measured = CASES[job.name]
    case = measured.case
    options = real_size.Options(device=device, layers=job.layers, small=job.small)
    module = real_size.build(case, options)
    if measured.lora:
        torch.manual_seed(1)
        attach_lora(module, LoraSpec(rank=real_size.LORA_RANK, alpha=64.0, targets=case.family.lora_targets))
    torch.manual_seed(2)
    conditioning = Conditioning(
        positive=case.conditioning(case.samples, device),
        negative=None,
        geometry=case.small_geometry if job.small else case.geometry,
    )
    shapes = case.small if job.small else case.latents
    microgroup = real_size.rollout(case, module, shapes, conditioning, options)
    for p in module.parameters():
        p.requires_grad_(p.requires_grad or not measured.lora)
        if p.requires_grad and measured.wide:
            p.data = p.data.float()
    for model in adaptable(module):
        split = None
        if mesh.sequence is not None:
            split = split_sequence(model, case.family.sequence_plan, mesh.sequence)  # type: ignore[attr-defined]
        if measured.recompute:
            recompute_blocks(model, case.family.fsdp_blocks, every=1, split=split)
    shard(
        module,
        blocks=case.family.fsdp_blocks,
        mesh=mesh.fsdp,
        compute_dtype=torch.bfloat16,
        fp32_modules=case.family.fp32_modules,
    )
    recipe = real_size.recipe_of(case)
    # Unsharded gradients of a model that is only just held by all GPUs are held by none.
    config = recipe.trainer.model_copy(update={"reduce_every_tile": not measured.wide})
    core = Trainer({"transformer": module}, config, total_steps=NUM_STEPS, layout=mesh)
    policies = real_size.policies_of(case, module, core, recipe)
    blocks = [
        pair_block(
            microgroup, advantages=[(-1.0) ** (i // (k + 1)) for i in range(case.samples)], mask=[True] * case.samples
        )
        for k in range(NUM_TILES)
    ]
    position = dist.get_rank(mesh.data)
    tiles = tiles_of(blocks[position :: mesh.data_ranks], tile_size=case.samples, device=device)
    algorithm = make_algorithm(recipe.algorithm, sampling=recipe.sampling, seed=0)
    loss = functools.partial(tile_loss, algorithm, policies, num_pairs=sum(b.num_pairs for b in blocks))
    seconds, steps = [], []
    for _ in range(NUM_STEPS):
        _wait(device)
        dist.barrier()
        start = time.perf_counter()
        steps.append(core.step([functools.partial(loss, tile) for tile in tiles]))
        _wait(device)
        seconds.append(time.perf_counter() - start)
    weights = {name: _sample(p) for name, p in core.named.items()}
    found = {
        "step_s": statistics.median(seconds[1:]),
        "first_step_s": seconds[0],
        "losses": [step.loss for step in steps],
        "grad_norms": [step.grad_norm for step in steps],
        "ratio_max_deviation": steps[0].maxima["ratio_max_deviation"],
        "peak_gib": real_size.peak_gib(device),
        "pairs_a_step": sum(b.num_pairs for b in blocks),
        "digest": digest_of({name: _local(p) for name, p in core.named.items()}) if layout.ranks == 1 else None,
    }
    return found, weights


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _local(p: Tensor) -> Tensor:
    return p.detach().to_local() if isinstance(p, DTensor) else p.detach()


def _sample(p: Tensor) -> Tensor:
    """A collective."""
    whole = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
    return whole.flatten()[::SAMPLED].float().cpu()


def compare(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of the reference, all sampled weights together."""
    difference = sum(float((weights[name] - value).square().sum()) for name, value in reference.items())
    return float((difference / sum(float(value.square().sum()) for value in reference.values())) ** 0.5)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All layouts of one case."""
    gpus = torch.cuda.device_count() if options.device == "cuda" else 2
    rows: dict[str, Any] = {}
    reference: dict[str, Tensor] | None = None
    for label in CASES[name].layouts:
        layout = LAYOUTS[label]
        if layout.ranks > gpus:
            rows[label] = {"left_out": f"needs {layout.ranks} GPUs, {gpus} are there"}
            continue
        with TemporaryDirectory(prefix="verst-parallel-") as folder:
            port = open_store("127.0.0.1", 0, rank=0, world_size=1).port
            job = Job(
                name=name,
                layout=label,
                port=port,
                folder=folder,
                device=options.device,
                layers=options.layers,
                small=options.small,
            )
            mp.spawn(rank_main, (job,), nprocs=layout.ranks)
            row = json.loads((Path(folder) / "found.json").read_text())
            weights = torch.load(Path(folder) / "weights.pt", weights_only=True)
        reference = weights if reference is None else reference
        first = next((found for found in rows.values() if "step_s" in found), row)
        row["speed_up"] = first["step_s"] / row["step_s"]
        row["loss_difference"] = max(abs(a - b) for a, b in zip(row["losses"], first["losses"], strict=True))
        row["weights_relative_difference"] = compare(weights, reference)
        if layout.ranks == 1:
            row["bitwise_equal"] = row["digest"] == first["digest"]
        rows[label] = row
        print(
            f"{name:24} {label:16} {row['step_s']:7.3f} s  x{row['speed_up']:.2f}  weights {row['weights_relative_difference']:.1e}"
            f"  ratio-1 {row['ratio_max_deviation']:.1e}  peak {row['peak_gib'] or 0:.1f} GiB",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "parallel.json")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": real_size.machine(torch.device(options.device)), "cases": {}}
    if options.out.exists():
        results["cases"] = json.loads(options.out.read_text())["cases"]
    results["machine"]["gpus"] = torch.cuda.device_count()
    for name in options.only:
        results["cases"][name] = measure(name, options)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
