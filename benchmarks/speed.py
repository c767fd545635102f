"""Rollout and training of an SD3.5-medium against a loop as flow_grpo's, on one GPU, each in a process of its own.

python benchmarks/speed.py [--only NAME ...] [--out FILE] [--small --device cpu]

The transformer has the released size and random weights (bf16, LoRA r = 32 on the family's default layers), with tiny text
encoders and autoencoder; 512 x 512, 10 steps, guidance 4.5, 16 images of 2 prompts, two trained steps a sample. The peer
keeps fp32 weights under autocast, samples and trains 9 rows at a time, both sides of the guidance in one batch, and
waits for the device at every step, as flow_grpo's public script does; it has no text encoders, autoencoder, transport
or optimizer's bookkeeping at all, ours has all but the transport. Ours is verst's engine worker and trainer, unchanged, with what
a recipe can ask for. Medians after a warm-up. Agreement: the largest abs(ratio - 1) and log-prob difference before the update.
The floor is TFLOP by torch's counter over CEILING. `--small --device cpu` runs the same code on a tiny model, to try it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from colocated import send_model, started
from real_size import CEILING, machine, peak_gib
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from verst.config import RlRecipe, parse_recipe
from verst.engine.resolve import Resolved, resolve
from verst.engine.worker import Worker
from verst.flow.determinism import make_deterministic
from verst.loops.batch import make_batch
from verst.loops.matrix import one_rank, sample_groups, sync_in_process
from verst.rollout.plan import plan_rollout
from verst.rollout.prompts import PromptSource
from verst.weights.lora import LoraSpec, attach_lora

import diffusers  # isort: skip  (after verst.families, which makes a torchvision built for another torch importable)

GUIDANCE = 4.5
NUM_STEPS = 10
PEER_BATCH = 9
TEXT_TOKENS, CLIP_TOKENS = 205, 77


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What of a recipe is changed; joined: microgroups of 8 that the engine puts into one batch."""

    compile: str = "off"
    deterministic: bool = True
    gradient: str = "conditional"
    joined: int = 1


SETTINGS: dict[str, Setting | None] = {
    "flow_grpo-like": None,
    "eager": Setting(),
    "compiled, exact": Setting(compile="inductor"),
    "compiled, fast": Setting(compile="inductor", deterministic=False, joined=2),
}


def recipe_for(folder: Path, setting: Setting, *, small: bool, device: torch.device) -> RlRecipe:
    prompts = folder.parent / "prompts.txt"
    groups = 2
    prompts.write_text("".join(f"{1000 + i}\n" for i in range(groups)))
    size = 64 if small else 512
    micro = 2 if small else 8
    recipe = parse_recipe(
        {
            "run": {
                "name": "speed",
                "iterations": 100,
                "device": device.type,
                "deterministic": setting.deterministic,
            },
            "model": {
                "path": str(folder),
                "dtype": "float32" if small else "bfloat16",
                "max_sequence_length": TEXT_TOKENS - CLIP_TOKENS,
                "compile": setting.compile,
                "finetune": {"type": "lora", "rank": 4 if small else 32},
            },
            "sampling": {
                "height": size,
                "width": size,
                "num_steps": NUM_STEPS,
                "guidance_scale": GUIDANCE,
                "guidance_gradient": setting.gradient,
                "steps": {"type": "window", "size": 2, "high": 5},
            },
            "prompts": {"train": str(prompts), "heldout": str(prompts), "shuffle": False},
            "rollout": {"num_groups": groups, "group_size": micro, "microgroup_size": micro},
            "rewards": [{"type": "brightness"}],
            "algorithm": {"type": "flow_grpo"},
            "trainer": {"tile_size": micro * setting.joined, "lr": 1e-4},
            "sync": {"type": "shm"},
        }
    )
    assert isinstance(recipe, RlRecipe)
    return recipe


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """After one call that is not counted."""
    found = []
    for _ in range(repeats + 1):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        found.append(time.perf_counter() - start)
    return found


def ours(pipe: Connection, folder: Path, setting: Setting, small: bool, device_name: str, repeats: int) -> None:
    """One setting of verst: rollouts, then updates on one of them."""
    device = torch.device(device_name)
    recipe = recipe_for(folder, setting, small=small, device=device)
    if setting.deterministic:
        make_deterministic(device)
    dtype = torch.float32 if small else torch.bfloat16
    worker = Worker(
        folder, dtype=dtype, device=device, compiled=recipe.model.compile, as_trained=recipe.run.deterministic
    )
    with one_rank(recipe, device=device) as trainer:
        sync_in_process(trainer, worker, version=0)
        source = PromptSource(recipe.prompts.train, seed=recipe.run.seed, shuffle=False)
        jobs = [resolve(task.request, worker.components) for task in plan_rollout(recipe, source, 0)]
        lone = resolve(
            next(iter(plan_rollout(recipe, source, 0))).request.model_copy(update={"seeds": (1,)}), worker.components
        )
        batches = [jobs[i : i + setting.joined] for i in range(0, len(jobs), setting.joined)]
        times = seconds_of(functools.partial(_generate, worker, batches), device, repeats)
        lone_times = seconds_of(functools.partial(_generate, worker, [[lone]]), device, repeats)
        images = sum(len(job.seeds) for job in jobs)
        found: dict[str, Any] = {
            "first_rollout_s": times[0],
            "images_a_second": images / statistics.median(times[1:]),
            "lone_image_s": statistics.median(lone_times[1:]),
            "rollout_peak_gib": peak_gib(device),
        }
        pipe.send(found)
        groups = sample_groups(recipe, worker)
        del worker
        _forget(device)
        (share,) = make_batch(recipe, groups).shares
        pairs = sum(block.num_pairs for blocks in share for block in blocks)
        updates = []
        times = seconds_of(lambda: updates.append(trainer.update(share)), device, repeats)
        found |= {
            "first_update_s": times[0],
            "pairs_a_second": pairs / statistics.median(times[1:]),
            "train_peak_gib": peak_gib(device),
            "ratio_max_deviation": updates[0].policy["ratio_max_deviation"],
            "log_prob_max_difference": updates[0].policy["log_prob_max_difference"],
        }
    pipe.send(found)


def _generate(worker: Worker, batches: list[list[Resolved]]) -> None:
    for jobs in batches:
        for outcome in worker.generate(jobs):
            if isinstance(outcome, Exception):
                raise outcome


def _forget(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


class Peer:
    """flow_grpo's way: its batch, its precision, its waits."""

    def __init__(self, folder: Path, *, small: bool, device: torch.device) -> None:
        self.device = device
        self.model = diffusers.SD3Transformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
        self.model.to(device).requires_grad_(False)
        targets = [f"attn.{n}" for n in ("to_q", "to_k", "to_v", "to_out.0")]
        targets += [f"attn.{n}" for n in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")]
        attach_lora(self.model, LoraSpec(rank=4 if small else 32, alpha=64.0, targets=tuple(targets)))
        config = self.model.config
        side = 8 if small else 64
        self.shape = (config.in_channels, side, side)
        self.text = torch.randn(2 * PEER_BATCH, TEXT_TOKENS, config.joint_attention_dim, device=device)
        self.pooled = torch.randn(2 * PEER_BATCH, config.pooled_projection_dim, device=device)
        self.sigmas = torch.linspace(1, 0, NUM_STEPS + 1, device=device)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)

    def velocity(self, x: Tensor, step: int) -> Tensor:
        time_of = (self.sigmas[step] * 1000).expand(2 * len(x))
        with torch.autocast(self.device.type, torch.bfloat16):
            v = self.model(
                hidden_states=torch.cat([x, x]),
                timestep=time_of,
                encoder_hidden_states=self.text,
                pooled_projections=self.pooled,
                return_dict=False,
            )[0].float()
        without, with_prompt = v.chunk(2)
        return without.detach() + GUIDANCE * (with_prompt - without.detach())

    def step(self, x: Tensor, v: Tensor, step: int, next_x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x', mean log-prob over its elements) of the SDE of arXiv 2505.05470, noise level 0.7."""
        sigma, dt = self.sigmas[step], self.sigmas[step + 1] - self.sigmas[step]
        std_t = 0.7 * torch.sqrt(sigma / (1 - torch.where(sigma == 1, self.sigmas[1], sigma)))
        mean = x * (1 + std_t**2 / (2 * sigma) * dt) + v * (1 + std_t**2 * (1 - sigma) / (2 * sigma)) * dt
        std = std_t * torch.sqrt(-dt)
        if next_x is None:
            next_x = mean + std * torch.randn_like(mean)
        log_prob = -((next_x.detach() - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
        return next_x, log_prob.mean(dim=(1, 2, 3))

    @torch.no_grad()
    def rollout(self) -> tuple[list[Tensor], list[Tensor]]:
        x = torch.randn(PEER_BATCH, *self.shape, device=self.device)
        path, log_probs = [x], []
        for step in range(NUM_STEPS):
            x, log_prob = self.step(x, self.velocity(x, step), step)
            path.append(x)
            log_probs.append(log_prob)
            # Its scheduler looks up the step by value.
            self.sigmas[step].item()
        return path, log_probs

    def train(self, path: list[Tensor], log_probs: list[Tensor], steps: tuple[int, ...]) -> None:
        advantage = torch.linspace(-1, 1, PEER_BATCH, device=self.device)
        for step in steps:
            _, log_prob = self.step(path[step], self.velocity(path[step], step), step, path[step + 1])
            ratio = torch.exp(log_prob - log_probs[step])
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - 1e-4, 1 + 1e-4)).mean()
            (loss / len(steps)).backward()
            loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def peer(pipe: Connection, folder: Path, small: bool, device_name: str, repeats: int) -> None:
    device = torch.device(device_name)
    torch.manual_seed(0)
    loop = Peer(folder, small=small, device=device)
    flops = FlopCounterMode(display=False)
    with flops, torch.no_grad():
        loop.velocity(torch.randn(PEER_BATCH, *loop.shape, device=device), 1)
    times = seconds_of(loop.rollout, device, repeats)
    found = {
        "tflop_a_row": flops.get_total_flops() / (2 * PEER_BATCH) / 1e12,
        "images_a_second": PEER_BATCH / statistics.median(times[1:]),
        "rollout_peak_gib": peak_gib(device),
    }
    path, log_probs = loop.rollout()
    _forget(device)
    steps = (1, 2)
    times = seconds_of(lambda: loop.train(path, log_probs, steps), device, repeats)
    found["pairs_a_second"] = PEER_BATCH * len(steps) / statistics.median(times[1:])
    found["train_peak_gib"] = peak_gib(device)
    pipe.send(found)


def everything_from(pipe: Connection) -> dict[str, Any]:
    """What a process has sent until it ended; raises EOFError where that is nothing."""
    found: dict[str, Any] = pipe.recv()
    try:
        while True:
            found = pipe.recv()
    except EOFError:
        return found


def compared(rows: dict[str, dict[str, Any]]) -> None:
    """Floors and factors over the peer, into the rows."""
    base = rows.get("flow_grpo-like")
    if base is None:
        return
    row_s = base["tflop_a_row"] / CEILING
    for row in rows.values():
        # Two rows an image and step; of a pair two forwards and the backward of one (two forwards' worth, less what
        # frozen weights save: 1.2).
        row["rollout_of_floor"] = row["images_a_second"] * 2 * NUM_STEPS * row_s
        row["rollout_over_peer"] = row["images_a_second"] / base["images_a_second"]
        if "pairs_a_second" in row:
            row["training_of_floor"] = row["pairs_a_second"] * 3.2 * row_s
            row["training_over_peer"] = row["pairs_a_second"] / base["pairs_a_second"]
            if base["train_peak_gib"]:
                row["train_peak_to_peer"] = row["train_peak_gib"] / base["train_peak_gib"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "speed.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    results: dict[str, Any] = {"machine": machine(device), "repeats": options.repeats, "settings": {}}
    rows = results["settings"]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        with started(send_model, folder, options.small, options.device) as pipe:
            pipe.recv()
        for name in options.only:
            setting = SETTINGS[name]
            start = time.perf_counter()
            rest = (options.small, options.device, options.repeats)
            job = (peer, folder, *rest) if setting is None else (ours, folder, setting, *rest)
            with started(*job) as pipe:
                rows[name] = everything_from(pipe)
            compared(rows)
            print(f"{name:18} {time.perf_counter() - start:5.0f} s  {json.dumps(rows[name])}", flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
