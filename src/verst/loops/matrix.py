"""The matrix: every model family x algorithm x {LoRA, full}, each cell one rollout, one update and one certified sync.

Tiny checkpoints, the real code: engine worker, wire, pairs, FSDP2 trainer, shared memory. `verst bench matrix` prints it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from verst.algorithms.sft import draw_sigmas, noised, velocity_loss
from verst.config import RlRecipe, parse_recipe, reward_name
from verst.engine.resolve import resolve
from verst.engine.wire import encode_response, to_microgroup
from verst.engine.worker import Worker
from verst.errors import InvariantError
from verst.families import recognise
from verst.families.base import without_guidance
from verst.families.tiny import TINY, build_tiny
from verst.loops.batch import make_batch
from verst.loops.local_engine import sync_in_process
from verst.rewards.local import LocalRewards
from verst.rollout.pipeline import ScoredMicrogroup, assemble
from verst.rollout.plan import plan_rollout
from verst.rollout.prompts import PromptSource
from verst.rollout.scoring import reward_batch
from verst.trainer.core import TileLoss
from verst.trainer.parallel import open_store
from verst.trainer.rl import RlTrainer
from verst.types import Conditioning, Group, Latents, Microgroup

ALGORITHMS: dict[str, dict[str, Any]] = {
    "flow_grpo": {},
    "grpo_guard": {},
    "nft": {"timestep_fraction": 0.3},
    "awm": {"timestep_fraction": 0.3},
    "dpo": {"timestep_fraction": 0.3, "reference": {"type": "frozen"}},
    "online_sft": {"timestep_fraction": 0.3},
    "sft": {},
}
"""Algorithm -> keys of its section that make a cell small or fit both kinds of weights."""
RECORDED = ("flow_grpo", "grpo_guard", "sft")
"""Sampled with stochastic steps; sft trains on media and takes any."""
FINETUNES = ("lora", "full")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one combination did."""

    family: str
    algorithm: str
    finetune: str
    ratio_max_deviation: float | None
    """Of the algorithms with a ratio of recorded steps: largest |ratio - 1| before the update."""
    changed: float
    """Largest change of the engine's velocity on a fixed input by update and sync."""
    agreement: float
    """Largest difference of engine and trainer velocity after the sync."""
    seconds: float

    @property
    def passed(self) -> bool:
        return self.ratio_max_deviation in (None, 0.0) and self.changed > 0 and self.agreement == 0.0


def run_matrix(
    names: Sequence[str], *, folder: Path, on_cell: Callable[[Cell], None] = lambda cell: None
) -> list[Cell]:
    """All cells of these tiny checkpoints; each checkpoint is built once, in `folder`."""
    cells = []
    for name in names:
        for algorithm in ALGORITHMS:
            for finetune in FINETUNES:
                cells.append(run_cell(name, algorithm, finetune, folder=folder))
                on_cell(cells[-1])
    return cells


def run_cell(name: str, algorithm: str, finetune: str, *, folder: Path) -> Cell:
    """One rollout, update and sync of a tiny checkpoint. Raises what the run itself would raise."""
    recipe = tiny_recipe(name, algorithm, finetune, folder=folder)
    return run_recipe(recipe, name=name, algorithm=algorithm)


def run_recipe(recipe: RlRecipe, *, name: str, algorithm: str) -> Cell:
    """The same of any small recipe; `sft` takes a step of its own on the samples' media."""
    started = time.perf_counter()
    worker = Worker(recipe.model.path, compiled=recipe.model.compile)
    with one_rank(recipe) as trainer:
        sync_in_process(trainer, worker, version=0)
        groups = sample_groups(recipe, worker)
        probe = velocity_probe(groups[0].microgroups[0], worker)
        before = probe(worker.components.transformer)
        ratio = None
        if algorithm == "sft":
            _sft_step(trainer, worker, groups[0].microgroups[0])
        else:
            policy = trainer.update(make_batch(recipe, groups).shares[0]).policy
            ratio = policy.get("ratio_max_deviation")
        sync_in_process(trainer, worker, version=1)
        after, trained = probe(worker.components.transformer), probe(trainer.transformer)
    return Cell(
        family=name,
        algorithm=algorithm,
        finetune=recipe.model.finetune.type,
        ratio_max_deviation=ratio,
        changed=_largest(before, after),
        agreement=_largest(after, trained),
        seconds=time.perf_counter() - started,
    )


def tiny_recipe(name: str, algorithm: str, finetune: str, *, folder: Path) -> RlRecipe:
    """A recipe for a tiny checkpoint: one prompt, two samples, one trained step."""
    tiny = TINY[name]
    model = folder / name
    if not model.exists():
        build_tiny(name, model)
    prompts = folder / f"{name}.jsonl"
    row: dict[str, Any] = {"prompt": tiny.prompts[0]}
    if tiny.num_images:
        row["image"] = condition_images(folder, tiny.num_images, mode=tiny.image_mode)
    prompts.write_text(json.dumps(row))
    recorded = algorithm in RECORDED
    section = {"type": "flow_grpo" if algorithm == "sft" else algorithm, **ALGORITHMS[algorithm]}
    request = dict(tiny.request)
    sampling: dict[str, Any] = {
        **{key: request[key] for key in ("height", "width", "num_frames", "fps") if key in request},
        "num_steps": request["num_inference_steps"],
        "guidance_scale": request.get("guidance_scale", 1.0) if recorded else without_guidance(recognise(model)),
        "negative_prompt": tiny.negative_prompt,
        "steps": {"type": "window", "size": 1, "low": 0, "high": 2} if recorded else {"type": "none"},
    }
    recipe = parse_recipe(
        {
            "run": {"name": name, "seed": 1, "iterations": 1, "threads": 1, "device": "cpu"},
            "model": {
                "path": str(model),
                "max_sequence_length": request.get("max_sequence_length", 128),
                "finetune": {"type": finetune, **({"rank": 2, "alpha": 4.0} if finetune == "lora" else {})},
            },
            "sampling": sampling,
            "prompts": {"train": str(prompts), "heldout": str(prompts)},
            "rollout": {"num_groups": 1, "group_size": 2, "microgroup_size": 2},
            "rewards": [{"type": "brightness"}],
            "algorithm": section,
            "trainer": {"tile_size": 2, "lr": 1e-2, "grad_clip": 1.0},
        }
    )
    assert isinstance(recipe, RlRecipe)
    return recipe


def condition_images(folder: Path, number: int, *, mode: str = "RGB") -> list[str]:
    """Paths of `number` fixed random pictures, for families that take some."""
    paths = []
    for index in range(number):
        path = folder / f"condition_{mode}_{index}.png"
        if not path.exists():
            pixels = np.random.default_rng(index).integers(0, 256, (64, 64, len(mode)), dtype=np.uint8)
            Image.fromarray(pixels, mode=mode).save(path)
        paths.append(str(path))
    return paths


@contextmanager
def one_rank(recipe: RlRecipe, *, device: torch.device | None = None) -> Iterator[RlTrainer]:
    """A trainer of one rank in this process."""
    store = open_store("127.0.0.1", 0, rank=0, world_size=1)
    trainer = RlTrainer(recipe, rank=0, world_size=1, store=store, device=device or torch.device("cpu"))
    try:
        yield trainer
    finally:
        trainer.close()


def sample_groups(recipe: RlRecipe, worker: Worker) -> list[Group]:
    """One rollout through worker and wire, scored by the recipe's first reward."""
    source = PromptSource(recipe.prompts.train, seed=recipe.run.seed, shuffle=False)
    rewards = LocalRewards(recipe.rewards)
    name = reward_name(recipe.rewards[0])
    scored = []
    for task in plan_rollout(recipe, source, 0):
        (records,) = worker.generate([resolve(task.request, worker.components)])
        if isinstance(records, Exception):
            raise records
        microgroup = to_microgroup(encode_response(records), task.keys)
        scores = asyncio.run(rewards.score(reward_batch(task, microgroup)))
        scored.append(ScoredMicrogroup(task=task, microgroup=microgroup, scores=scores))
    groups = assemble(scored, group_size=recipe.rollout.group_size)
    if len(set(groups[0].rewards()[name])) < 2:
        raise InvariantError("the two samples of the tiny rollout got the same reward: nothing to train on")
    return groups


def velocity_probe(microgroup: Microgroup, worker: Worker) -> Callable[[torch.nn.Module], Latents]:
    """module -> its velocity on one fixed input of the microgroup's shape."""
    family, conditioning = worker.family, microgroup.conditioning
    assert conditioning.geometry is not None
    generator = torch.Generator().manual_seed(0)
    shapes = family.latent_shapes(worker.components, conditioning.geometry)
    count = len(microgroup.samples)
    latents = {name: torch.randn((count, *shape), generator=generator) for name, shape in shapes.items()}
    sigmas = {name: torch.linspace(0.95, 0.2, count) for name in shapes}

    @torch.no_grad()
    def probe(module: torch.nn.Module) -> Latents:
        dtype = worker.components.dtype
        return family.velocity(module, latents, sigmas, conditioning, guidance_scale=1.0, dtype=dtype)

    return probe


def _sft_step(trainer: RlTrainer, worker: Worker, microgroup: Microgroup) -> None:
    """One optimizer step of rectified flow on the samples' own media."""
    family = worker.family
    x0 = family.encode_media(worker.components, torch.stack([s.media for s in microgroup.samples]))
    assert microgroup.conditioning.geometry is not None
    shapes = family.latent_shapes(worker.components, microgroup.conditioning.geometry)
    generator = torch.Generator().manual_seed(1)
    count = len(microgroup.samples)
    # A stream without media of its own (sound of a silent clip) trains on its encoding of nothing.
    x0 = {name: x0.get(name, torch.zeros((count, *shape))) for name, shape in shapes.items()}
    eps = {name: torch.randn(value.shape, generator=generator) for name, value in x0.items()}
    sigma = draw_sigmas("uniform", torch.rand(count, generator=generator))
    tile = functools.partial(_sft_loss, trainer, x0, eps, sigma, microgroup.conditioning)
    trainer.core.step([tile])


def _sft_loss(trainer: RlTrainer, x0: Latents, eps: Latents, sigma: Tensor, conditioning: Conditioning) -> TileLoss:
    x = {name: noised(clean, eps[name], sigma) for name, clean in x0.items()}
    v = trainer.family.velocity(trainer.transformer, x, dict.fromkeys(x, sigma), conditioning, guidance_scale=1.0)
    losses = [velocity_loss(v[name], x0[name], eps[name]) for name in x0]
    return TileLoss(loss=torch.stack(losses).mean())


def _largest(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def print_matrix(names: Sequence[str] = ()) -> int:
    """The table on standard output; returns the number of cells that failed."""
    chosen = list(names) or sorted(TINY)
    failed = 0
    print(f"{'family':20} {'algorithm':10} {'weights':8} {'ratio-1':>9} {'changed':>9} {'agree':>9} {'s':>6}  result")
    with tempfile.TemporaryDirectory(prefix="verst-matrix-") as folder:

        def show(cell: Cell) -> None:
            ratio = "" if cell.ratio_max_deviation is None else f"{cell.ratio_max_deviation:.1e}"
            print(
                f"{cell.family:20} {cell.algorithm:10} {cell.finetune:8} {ratio:>9} {cell.changed:9.1e} "
                f"{cell.agreement:9.1e} {cell.seconds:6.1f}  {'ok' if cell.passed else 'FAILED'}",
                flush=True,
            )

        cells = run_matrix(chosen, folder=Path(folder), on_cell=show)
        failed = sum(not cell.passed for cell in cells)
    print(f"{len(cells) - failed} passed, {failed} failed")
    return failed
