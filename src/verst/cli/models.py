"""`verst eval`, `generate`, `serve`, `export`: one model in this process, no Ray."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def evaluate(target: Path, overrides: Sequence[str], *, checkpoint: str, ema: bool) -> None:
    from verst.config import RlRecipe, load_recipe
    from verst.errors import ConfigError
    from verst.loops.evaluate import evaluate_model
    from verst.trainer.export import find_checkpoint

    recipe = load_recipe(target / "recipe.toml" if target.is_dir() else target, overrides)
    if not isinstance(recipe, RlRecipe):
        raise ConfigError(f"{target} is an SFT recipe, which evaluates itself while it trains")
    if checkpoint != "newest" and not target.is_dir():
        raise ConfigError(
            f"--checkpoint {checkpoint}: {target} is a recipe, whose untrained model is evaluated; name a run"
        )
    folder = find_checkpoint(target, checkpoint) if target.is_dir() else None
    for name, value in asyncio.run(evaluate_model(recipe, checkpoint=folder, ema=ema)).items():
        print(f"{name}: {value:.6g}")


def generate(
    model: Path,
    prompts: Sequence[str],
    *,
    out: Path,
    seed: int,
    device: str,
    sampling: Mapping[str, Any],
    checkpoint: str,
) -> None:
    from PIL import Image

    from verst.engine.request import GenerateRequest
    from verst.engine.resolve import resolve

    worker, defaults = _worker(model, device, checkpoint)
    given = {**defaults, **{key: value for key, value in sampling.items() if value is not None}}
    seeds = tuple(seed + i for i in range(len(prompts)))
    request = GenerateRequest(prompts=tuple(prompts), seeds=seeds, rollout=False, media_format="uint8", **given)
    (records,) = worker.generate([resolve(request, worker.components)])
    if isinstance(records, Exception):
        raise records
    out.mkdir(parents=True, exist_ok=True)
    for index, record in enumerate(records):
        path = out / f"{index:03d}_{re.sub(r'[^A-Za-z0-9]+', '_', record['prompt'])[:60]}.png"
        Image.fromarray(record["media"][0].cpu().numpy()).save(path)
        print(path)


def serve(model: Path, *, port: int, dtype: str, device: str, **options: Any) -> None:
    import torch

    from verst.engine.server import EngineServer
    from verst.web.guard import token_from_environment

    options |= {"dtype": getattr(torch, dtype), "device": _device(device), "token": token_from_environment()}
    server = EngineServer(model, port=port, **options)
    server.serve_forever()


def export(run: Path, out: Path, *, what: str, checkpoint: str, ema: bool) -> None:
    from verst.loops.run_folder import stored_rl_recipe
    from verst.trainer.export import export as write

    print(write(run, stored_rl_recipe(run), out, what=what, which=checkpoint, ema=ema))  # type: ignore[arg-type]


def _worker(model: Path, device: str, checkpoint: str) -> tuple[Any, dict[str, Any]]:
    """A worker for a model folder or for what a run has learned, and the run's own sampling parameters."""
    import torch

    from verst.engine.worker import Worker
    from verst.families.loading import index_file
    from verst.loops.run_folder import stored_rl_recipe
    from verst.trainer.export import find_checkpoint, load_trained

    torch.set_num_threads(os.cpu_count() or 1)
    if index_file(model).exists():
        return Worker(model, device=_device(device)), {}
    recipe = stored_rl_recipe(model)
    worker = Worker(
        recipe.model.path,
        dtype=getattr(torch, recipe.model.dtype),
        fp32_modules=recipe.model.fp32_modules,
        device=_device(device),
    )
    load_trained(worker.components.transformer, recipe, find_checkpoint(model, checkpoint), ema=False)
    sampling = recipe.sampling
    return worker, {
        "height": sampling.height,
        "width": sampling.width,
        "num_inference_steps": sampling.num_steps,
        "guidance_scale": sampling.guidance_scale,
        "negative_prompt": sampling.negative_prompt,
        "sigma_shift": sampling.sigma_shift,
        "max_sequence_length": recipe.model.max_sequence_length,
    }


def _device(name: str) -> str:
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
