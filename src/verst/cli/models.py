"""`verst eval`, `generate`, `serve`, `export`: one model in this process, no Ray."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from verst.cli.options import print_json, waiting


def evaluate(target: Path, overrides: Sequence[str], *, checkpoint: str, ema: bool, as_json: bool, quiet: bool) -> None:
    from verst.config import load_recipe

    run = target if target.is_dir() else None
    recipe = load_recipe(target if run is None else run / "recipe.toml", overrides)
    with waiting(quiet=quiet or as_json) as tell:
        tell("starting")
        from verst.loops.evaluate import evaluate as evaluated

        found = asyncio.run(evaluated(recipe, run, checkpoint=checkpoint, ema=ema, tell=tell))
    if as_json:
        print_json(found)
        return
    for name, value in found.metrics.items():
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
    as_json: bool,
    quiet: bool,
) -> None:
    with waiting(quiet=quiet or as_json) as tell:
        tell(f"loading {model}")
        from verst.loops import local_engine

        worker, defaults = local_engine.open_worker(model, device=device, checkpoint=checkpoint)
        values = {
            "prompts": tuple(prompts),
            "seeds": tuple(range(seed, seed + len(prompts))),
            "rollout": False,
            "media_format": "uint8",
            **defaults,
            **{key: value for key, value in sampling.items() if value is not None},
        }
        records = local_engine.generate(worker, values, tell=tell)
        out.mkdir(parents=True, exist_ok=True)
        made = []
        for index, record in enumerate(records):
            tell("writing", done=index, total=len(records))
            stem = f"{index:03d}_{re.sub(r'[^A-Za-z0-9]+', '_', record['prompt'])[:60]}"
            sound = {name: record[name] for name in ("fps", "audio", "sample_rate")}
            path = local_engine.save_made(out, stem, record["media"], **sound)
            made.append({"path": path, "prompt": record["prompt"], "seed": seed + index})
    if as_json:
        print_json(made)
        return
    for picture in made:
        print(picture["path"])


def serve(model: Path, *, port: int, dtype: str, device: str, **options: Any) -> None:
    with waiting() as tell:
        tell("starting")
        import torch

        from verst.engine.server import EngineServer
        from verst.loops.local_engine import pick_device
        from verst.web.guard import token_from_environment

    options |= {"dtype": getattr(torch, dtype), "device": pick_device(device), "token": token_from_environment()}
    server = EngineServer(model, port=port, **options)
    server.serve_forever()


def export(
    run: Path,
    out: Path,
    *,
    what: Literal["auto", "lora", "pipeline"],
    checkpoint: str,
    ema: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    with waiting(quiet=quiet or as_json) as tell:
        tell(f"reading {run}")
        from verst.loops.run_folder import stored_rl_recipe
        from verst.trainer.export import export as write

        made = write(run, stored_rl_recipe(run), out, what=what, which=checkpoint, ema=ema, tell=tell)
    if as_json:
        print_json(made)
    else:
        print(made.folder)
