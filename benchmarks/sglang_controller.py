"""SGLang-Diffusion's own rollout controller and scheduler, run alone in a process of its own.

python benchmarks/sglang_controller.py WHEEL RUNS OUT

WHEEL is the unpacked sglang 0.5.23 wheel, RUNS a torch file with a list of runs (the keys are `run`'s arguments), OUT
the torch file to write: one dict of tensors a run. Only torch, numpy and diffusers are needed beside the wheel: empty
packages stand in for those that would import the rest of it, which is why this must not share a process.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RUNTIME = "sglang.multimodal_gen.runtime"
PACKAGES = (
    "sglang",
    "sglang.multimodal_gen",
    RUNTIME,
    *(f"{RUNTIME}.{name}" for name in ("post_training", "models", "models.schedulers", "utils")),
)


def load(wheel: Path) -> tuple[Any, Any]:
    """The controller's class and the scheduler's."""
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(wheel.joinpath(*name.split(".")))]
        sys.modules[name] = package
    logs = types.ModuleType(f"{RUNTIME}.utils.logging_utils")
    logs.init_logger = logging.getLogger  # type: ignore[attr-defined]
    sys.modules[logs.__name__] = logs
    controller = importlib.import_module(f"{RUNTIME}.post_training.flow_rollout_controller")
    scheduler = importlib.import_module(f"{RUNTIME}.models.schedulers.scheduling_flow_match_euler_discrete")
    return controller.FlowRolloutController, scheduler.FlowMatchEulerDiscreteScheduler


def run(
    classes: tuple[Any, Any],
    *,
    mode: str,
    eta: float,
    no_const: bool,
    sde_steps: list[int] | None,
    kept: list[int] | None,
    seed: int,
    drawn_before: Sequence[Sequence[int]],
    initial: Tensor,
    patterns: Tensor,
    shard: tuple[int, int, int],
    num_steps: int,
    shift: float,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """One sample of one stream on one rank.

    initial: [1, ...] full fp32; patterns: [T, ...] full, what the velocity is made of; drawn_before: shapes that the
    generator of `seed` draws before the first step; shard: (dimension of [1, ...], start, length) of the rank.
    """
    make_controller, make_scheduler = classes
    generator = torch.Generator().manual_seed(seed)
    for shape in drawn_before:
        torch.randn(tuple(shape), generator=generator)
    scheduler = make_scheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    controller = make_controller(
        sde_type=mode,
        noise_level=eta,
        log_prob_no_const=no_const,
        debug_mode=True,
        sde_step_indices=sde_steps,
        generator=generator,
        return_dit_trajectory=True,
        return_step_indices=kept,
        shard_for_sp=lambda batch, full: full.narrow(*shard),
        gather_for_sp=lambda batch, local: local,
        sigmas=scheduler.sigmas,
        latents_shape=tuple(initial.shape),
    )
    step = functools.partial(controller.transition, batch=None)
    x = initial.narrow(*shard)
    for i, timestep in enumerate(scheduler.timesteps):
        v = (patterns[i : i + 1].narrow(*shard) - 0.25 * x.float()).to(dtype)
        x = scheduler.step(v, timestep, x, transition=step, return_dict=False)[0]
    controller.record_trajectory_step(latents=x, timestep_value=torch.zeros(()), step_index=num_steps)
    noises, means, stds, outputs = controller.consume_local_rollout_debug_tensors()
    latents = controller.step_latents
    return {
        "latents": torch.stack([t.float() for t in latents], dim=1) if latents else x.new_zeros((1, 0)),
        "kept_timesteps": torch.stack([t.float() for t in controller.step_timesteps]),
        "sigmas": scheduler.sigmas,
        "log_probs": controller.collect_rollout_log_probs(),
        "noise": noises,
        "mean": means,
        "std": stds,
        "model_output": outputs,
        "final": x.float(),
    }


def main() -> None:
    wheel, runs, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    classes = load(wheel)
    torch.save([run(classes, **one) for one in torch.load(runs)], out)


if __name__ == "__main__":
    main()
