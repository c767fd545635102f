"""Seven families at their real size on one GPU: one rollout microgroup and one LoRA training step each.

python benchmarks/real_size.py [--only NAME ...] [--layers N --small --device cpu] [--out FILE]

Transformers have random weights of the released size in bf16, built on the device; conditioning is random and of the
text encoders' shapes; text encoders and autoencoders are not part of it. The rollout is verst's own denoise loop with
a controller (sde, window of one step), the training step verst's own FSDP2 trainer on the recorded pairs (LoRA r = 32,
activation checkpointing). Reported: seconds, peak memory, TFLOP of one forward by torch's counter, MFU against
CEILING. `--layers 1 --small --device cpu` runs the same code on a CPU, to try it; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from verst.algorithms import make_algorithm
from verst.algorithms.pairs import pair_block, tiles_of
from verst.config import RlRecipe, parse_recipe
from verst.families.base import Family
from verst.families.cosmos3 import Cosmos3
from verst.families.krea2 import Krea2
from verst.families.ltx2 import Layout, Ltx2
from verst.families.minimax_h3 import MiniMaxH3
from verst.families.qwen_image import QwenImage
from verst.families.sd3 import Sd3
from verst.families.wan import Wan
from verst.flow.controller import RolloutOptions, make_transition
from verst.flow.denoise import denoise
from verst.flow.hooks import Stream, prepare_rollout
from verst.flow.noise import SampleNoise
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.trainer.core import Trainer
from verst.trainer.forward import Forward
from verst.trainer.parallel import join_mesh, leave_mesh, open_store, shard
from verst.trainer.policies import TrainerPolicies
from verst.trainer.recompute import recompute_blocks
from verst.trainer.rl import tile_loss
from verst.types import Conditioning, Geometry, Latents, Microgroup, Sample, SampleKey
from verst.weights.lora import LoraSpec, adaptable, attach_lora

import diffusers  # isort: skip  (after verst.families, which makes a torchvision built for another torch importable)

CEILING = 687.0
"""TFLOP/s: sustained bf16 matrix products of one H200 (back to back, power-capped)."""
NUM_STEPS = 4
LORA_RANK = 32
Make = Callable[[int, torch.device], dict[str, Tensor]]


SD35_MEDIUM: dict[str, Any] = {
    "num_layers": 24,
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "caption_projection_dim": 1536,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
    "pos_embed_max_size": 384,
    "sample_size": 128,
}
"""Of SD3Transformer2DModel."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One family at its real size."""

    family: Family
    model: str
    """Transformer class of diffusers."""
    config: dict[str, Any] = field(default_factory=dict)
    """What differs from the class's defaults, which are the released sizes."""
    layers_key: str = "num_layers"
    experts: int = 1
    samples: int = 2
    """Of the microgroup."""
    geometry: Geometry
    latents: dict[str, tuple[int, ...]]
    small: dict[str, tuple[int, ...]]
    """Latent shapes of a trial on a CPU."""
    small_geometry: Geometry
    conditioning: Make


def _text(length: int, dim: int, *, mask: str | None = None, mask_dtype: torch.dtype = torch.int64) -> Make:
    def make(rows: int, device: torch.device) -> dict[str, Tensor]:
        out = {"encoder_hidden_states": torch.randn(rows, length, dim, device=device)}
        if mask is not None:
            out[mask] = torch.ones(rows, length, device=device, dtype=mask_dtype)
        return out

    return make


def _sd3(rows: int, device: torch.device) -> dict[str, Tensor]:
    return {**_text(205, 4096)(rows, device), "pooled_projections": torch.randn(rows, 2048, device=device)}


def _ltx2(rows: int, device: torch.device) -> dict[str, Tensor]:
    text = _text(256, 3840, mask="attention_mask")(rows, device)
    return {**text, "audio_encoder_hidden_states": torch.randn(rows, 256, 3840, device=device)}


def _cosmos3(rows: int, device: torch.device) -> dict[str, Tensor]:
    ids = torch.randint(0, 150_000, (rows, 64), device=device)
    return {"input_ids": ids, "text_mask": torch.ones_like(ids, dtype=torch.bool)}


def _krea2(rows: int, device: torch.device) -> dict[str, Tensor]:
    mask = torch.ones(rows, 64, device=device, dtype=torch.bool)
    return {"encoder_hidden_states": torch.randn(rows, 64, 12, 2560, device=device), "encoder_attention_mask": mask}


_IMAGE = Geometry(height=512, width=512)
_SMALL = Geometry(height=64, width=64)
CASES: dict[str, Case] = {
    "sd3.5-medium": Case(
        family=Sd3(),
        model="SD3Transformer2DModel",
        config=SD35_MEDIUM,
        samples=8,
        geometry=_IMAGE,
        latents={"visual": (16, 64, 64)},
        small={"visual": (16, 8, 8)},
        small_geometry=_SMALL,
        conditioning=_sd3,
    ),
    "qwen-image": Case(
        family=QwenImage(),
        model="QwenImageTransformer2DModel",
        samples=4,
        geometry=_IMAGE,
        latents={"visual": (16, 64, 64)},
        small={"visual": (16, 8, 8)},
        small_geometry=_SMALL,
        conditioning=_text(128, 3584, mask="encoder_attention_mask"),
    ),
    "wan2.2-a14b": Case(
        family=Wan(boundary_ratio=0.875),
        model="WanTransformer3DModel",
        experts=2,
        geometry=Geometry(height=480, width=832, num_frames=33, fps=16.0),
        latents={"visual": (16, 9, 60, 104)},
        small={"visual": (16, 2, 8, 8)},
        small_geometry=Geometry(height=64, width=64, num_frames=5, fps=16.0),
        conditioning=_text(512, 4096),
    ),
    "ltx-2": Case(
        family=Ltx2(layout=Layout(spatial=32, temporal=8, mel_bins=16, audio_channels=8, audio_frames_a_second=25.0)),
        model="LTX2VideoTransformer3DModel",
        geometry=Geometry(height=512, width=768, num_frames=57, fps=24.0),
        latents={"visual": (128, 8, 16, 24), "audio": (8, 59, 16)},
        small={"visual": (128, 2, 2, 2), "audio": (8, 9, 16)},
        small_geometry=Geometry(height=64, width=64, num_frames=9, fps=24.0),
        conditioning=_ltx2,
    ),
    "cosmos3": Case(
        family=Cosmos3(),
        model="Cosmos3OmniTransformer",
        config={"rope_axes_dim": (24, 20, 20)},
        layers_key="num_hidden_layers",
        geometry=Geometry(height=480, width=832, fps=24.0),
        latents={"visual": (48, 1, 30, 52)},
        small={"visual": (48, 1, 4, 4)},
        small_geometry=Geometry(height=64, width=64, fps=24.0),
        conditioning=_cosmos3,
    ),
    "minimax-h3": Case(
        family=MiniMaxH3(),
        model="MiniMaxH3Transformer3DModel",
        geometry=Geometry(height=256, width=448, num_frames=124, fps=24),
        latents={"visual": (24, 37, 16, 28), "audio": (414, 32)},
        small={"visual": (24, 37, 2, 2), "audio": (414, 32)},
        small_geometry=Geometry(height=32, width=32, num_frames=124, fps=24),
        conditioning=_text(64, 5120, mask="text_mask", mask_dtype=torch.bool),
    ),
    "krea2": Case(
        family=Krea2(),
        model="Krea2Transformer2DModel",
        samples=4,
        geometry=_IMAGE,
        latents={"visual": (16, 64, 64)},
        small={"visual": (16, 8, 8)},
        small_geometry=_SMALL,
        conditioning=_krea2,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    device: torch.device
    layers: int | None
    small: bool


class Clock:
    """Seconds of a block, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] = time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(case: Case, options: Options) -> dict[str, Any]:
    """Build, roll out, train one step."""
    clock = Clock(options.device)
    with clock("build"):
        module = build(case, options)
    geometry = case.small_geometry if options.small else case.geometry
    shapes = case.small if options.small else case.latents
    conditioning = Conditioning(
        positive=case.conditioning(case.samples, options.device), negative=None, geometry=geometry
    )
    flops = count_flops(case, module, shapes, conditioning, options)
    with clock("rollout"):
        microgroup = rollout(case, module, shapes, conditioning, options)
    rollout_peak = peak_gib(options.device)
    step = train_step(case, module, microgroup, options, clock)
    parameters = sum(p.numel() for p in module.parameters())
    rollout_s, train_s = clock.seconds["rollout"], clock.seconds["train"]
    # Checkpointing runs the forward twice and the backward costs two more; frozen weights need no gradient of theirs.
    trained = flops * 3.0
    return {
        "parameters_billion": parameters / 1e9,
        "samples": case.samples,
        "denoising_steps": NUM_STEPS,
        "geometry": {"height": geometry.height, "width": geometry.width, "frames": geometry.num_frames},
        "build_s": clock.seconds["build"],
        "forward_tflop": flops / 1e12,
        "rollout_s": rollout_s,
        "rollout_mfu": flops * NUM_STEPS / 1e12 / rollout_s / CEILING,
        "rollout_peak_gib": rollout_peak,
        "train_step_s": train_s,
        "train_mfu": trained / 1e12 / train_s / CEILING,
        "train_peak_gib": peak_gib(options.device),
        **step,
    }


def build(case: Case, options: Options) -> nn.Module:
    """The transformer, or both experts, with random weights in bf16."""
    config = dict(case.config)
    if options.layers is not None:
        config[case.layers_key] = options.layers
    torch.set_default_dtype(torch.bfloat16)
    try:
        with options.device:
            torch.manual_seed(0)
            models = [getattr(diffusers, case.model)(**config) for _ in range(case.experts)]
    finally:
        torch.set_default_dtype(torch.float32)
    for model in models:
        model.to(torch.bfloat16).eval().requires_grad_(False)
    return (
        models[0]
        if len(models) == 1
        else nn.ModuleDict(dict(zip(("transformer", "transformer_2"), models, strict=True)))
    )


def _velocity(
    case: Case, module: nn.Module, conditioning: Conditioning
) -> Callable[[Latents, dict[str, Tensor]], Latents]:
    def velocity(x: Latents, sigmas: dict[str, Tensor]) -> Latents:
        return case.family.velocity(module, x, sigmas, conditioning, guidance_scale=1.0, dtype=torch.bfloat16)

    return velocity


_ATTENTION = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention") for kind in ("flash", "efficient", "cudnn")
]


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products a head; torch's own count refuses heads that share keys (grouped queries)."""
    del args, out_shape, kwargs
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[2] * (width + value[3]))


@torch.no_grad()
def count_flops(
    case: Case, module: nn.Module, shapes: dict[str, tuple[int, ...]], conditioning: Conditioning, options: Options
) -> int:
    """Of one forward of the microgroup; also warms the kernels up."""
    x = {name: torch.randn(case.samples, *shape, device=options.device) for name, shape in shapes.items()}
    sigmas = {name: torch.full((case.samples,), 0.9, device=options.device) for name in shapes}
    with FlopCounterMode(display=False, custom_mapping=dict.fromkeys(_ATTENTION, _attention_flops)) as counter:
        _velocity(case, module, conditioning)(x, sigmas)
    return counter.get_total_flops()


def rollout(
    case: Case, module: nn.Module, shapes: dict[str, tuple[int, ...]], conditioning: Conditioning, options: Options
) -> Microgroup:
    """One microgroup, the second step stochastic."""
    schedulers = {}
    for name in shapes:
        schedulers[name] = FlowMatchEulerDiscreteScheduler(shift=3.0)
        schedulers[name].set_timesteps(NUM_STEPS, device=options.device)
    noise = SampleNoise(list(range(case.samples)))
    latents = {name: noise.initial(shape).to(options.device) for name, shape in shapes.items()}
    streams = [
        Stream(
            name=name,
            sigmas=schedulers[name].sigmas,
            latent_shape=tuple(x.shape),
            noise=noise.steps(name, first=index == 0),
        )
        for index, (name, x) in enumerate(latents.items())
    ]
    wanted = RolloutOptions(transition=make_transition("sde", 0.7), sde_step_indices=(1,), return_step_indices=(1, 2))
    run = prepare_rollout(wanted, streams)
    final = denoise(_velocity(case, module, conditioning), latents, schedulers, transitions=run.transitions)
    paths = run.finalize(final, {name: s.timesteps for name, s in schedulers.items()}).trajectories
    samples = tuple(
        Sample(
            key=SampleKey(rollout=0, group=0, index=i),
            prompt="",
            seed=i,
            initial_seed=i,
            weight_version=0,
            media=torch.zeros(1, 1, 1, 3, dtype=torch.uint8),
            fps=None,
            streams={name: rows[i] for name, rows in paths.items()},
        )
        for i in range(case.samples)
    )
    return Microgroup(samples=samples, conditioning=conditioning, echo={})


def train_step(case: Case, module: nn.Module, microgroup: Microgroup, options: Options, clock: Clock) -> dict[str, Any]:
    """LoRA, FSDP2 over one rank, one optimizer step on the recorded pairs (the second of two is timed)."""
    recipe = recipe_of(case)
    attach_lora(module, LoraSpec(rank=LORA_RANK, alpha=64.0, targets=case.family.lora_targets))
    for p in module.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    for model in adaptable(module):
        recompute_blocks(model, case.family.fsdp_blocks, every=1)
    layout = join_mesh(
        rank=0, world_size=1, store=open_store("127.0.0.1", 0, rank=0, world_size=1), device=options.device
    )
    try:
        shard(
            module,
            blocks=case.family.fsdp_blocks,
            mesh=layout.fsdp,
            compute_dtype=torch.bfloat16,
            fp32_modules=case.family.fp32_modules,
        )
        core = Trainer({"transformer": module}, recipe.trainer, total_steps=2, layout=layout)
        policies = policies_of(case, module, core, recipe)
        advantages = [(-1.0) ** i for i in range(case.samples)]
        block = pair_block(microgroup, advantages=advantages, mask=[True] * case.samples)
        tiles = tiles_of([block], tile_size=case.samples, device=options.device)
        algorithm = make_algorithm(recipe.algorithm, sampling=recipe.sampling, seed=recipe.run.seed)
        loss = functools.partial(tile_loss, algorithm, policies, num_pairs=block.num_pairs)
        closures = [functools.partial(loss, tile) for tile in tiles]
        first = core.step(closures)
        with clock("train"):
            core.step(closures)
    finally:
        leave_mesh()
    return {
        "lora_parameters_million": sum(p.numel() for p in core.named.values()) / 1e6,
        "ratio_max_deviation": first.maxima["ratio_max_deviation"],
        "grad_norm": first.grad_norm,
    }


def policies_of(case: Case, module: nn.Module, core: Trainer, recipe: RlRecipe) -> TrainerPolicies:
    return TrainerPolicies(
        forward=Forward.of(recipe.sampling, case.family, torch.bfloat16),
        live=module,
        named=core.named,
        reference=None,
        old="none",
        transition=make_transition(recipe.sampling.transition.type, recipe.sampling.transition.eta),
    )


def recipe_of(case: Case) -> RlRecipe:
    """One optimizer step of Flow-GRPO by LoRA; whole microgroups as tiles."""
    recipe = parse_recipe(
        {
            "run": {"name": "real_size", "iterations": 1},
            "model": {"path": ".", "dtype": "bfloat16", "finetune": {"type": "lora", "rank": LORA_RANK}},
            "sampling": {"num_steps": NUM_STEPS, "steps": {"type": "window", "size": 1, "high": 3}},
            "prompts": {"train": ".", "heldout": "."},
            "rollout": {"num_groups": 1, "group_size": case.samples, "microgroup_size": case.samples},
            "rewards": [{"type": "brightness"}],
            "algorithm": {"type": "flow_grpo"},
            "trainer": {"tile_size": case.samples, "lr": 1e-4},
        }
    )
    assert isinstance(recipe, RlRecipe)
    return recipe


def peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "ceiling_tflops": CEILING,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "real_size.json")
    arguments = parser.parse_args()
    options = Options(device=torch.device(arguments.device), layers=arguments.layers, small=arguments.small)
    results: dict[str, Any] = {"machine": machine(options.device), "families": {}}
    if arguments.out.exists():
        results["families"] = json.loads(arguments.out.read_text())["families"]
    for name in arguments.only:
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(options.device)
        results["families"][name] = row = measure(CASES[name], options)
        print(
            f"{name:14} {row['parameters_billion']:6.2f} B  rollout {row['rollout_s']:7.2f} s  "
            f"train {row['train_step_s']:7.2f} s  peak {row['train_peak_gib'] or 0:6.1f} GiB  "
            f"MFU {row['rollout_mfu']:.2f} / {row['train_mfu']:.2f}  ratio-1 {row['ratio_max_deviation']:.1e}",
            flush=True,
        )
        # Written after each: a machine that is taken away keeps what was measured.
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
