"""A model in this process that does an engine's work: opened, sampled through the run's own pipeline, handed weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from verst.engine.client import check_echo
from verst.engine.request import GenerateRequest, explain
from verst.engine.resolve import resolve
from verst.engine.wire import Answer, encode_response, to_microgroup
from verst.engine.worker import Worker
from verst.errors import ConfigError, RequestError
from verst.families.loading import index_file
from verst.loops.run_folder import stored_rl_recipe
from verst.obs.media import save_media
from verst.obs.waiting import Tell, nobody
from verst.rollout.pipeline import Pipeline
from verst.rollout.plan import MicrogroupTask
from verst.rollout.scoring import Scorer
from verst.trainer.export import find_checkpoint, load_trained
from verst.trainer.rl import DTYPES, RlTrainer
from verst.types import Microgroup, SampleKey
from verst.weights.manifest import verify


def open_worker(
    model: Path, *, device: str = "auto", dtype: str | None = None, checkpoint: str = "newest"
) -> tuple[Worker, dict[str, Any]]:
    """A worker for a model folder or for what a run has learned, and the run's own sampling parameters.

    Raises ConfigError or ModelError for a folder that is neither, and for a wrong dtype.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: valid: {', '.join(DTYPES)}")
    if not model.exists():
        raise ConfigError(f"{model} does not exist; name a model folder or a run folder")
    if index_file(model).exists():
        return Worker(model, dtype=DTYPES[dtype or "float32"], device=pick_device(device)), {}
    recipe = stored_rl_recipe(model)
    worker = Worker(
        recipe.model.path,
        dtype=DTYPES[dtype or recipe.model.dtype],
        fp32_modules=recipe.model.fp32_modules,
        device=pick_device(device),
    )
    load_trained(worker.components.transformer, recipe, find_checkpoint(model, checkpoint), ema=False)
    sampling = recipe.sampling
    return worker, {
        "height": sampling.height,
        "width": sampling.width,
        "num_frames": sampling.num_frames,
        "fps": sampling.fps,
        "num_inference_steps": sampling.num_steps,
        "guidance_scale": sampling.guidance_scale,
        "negative_prompt": sampling.negative_prompt,
        "sigma_shift": sampling.sigma_shift,
        "max_sequence_length": recipe.model.max_sequence_length,
    }


def pick_device(name: str) -> str:
    """`auto` is CUDA where there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def generate(worker: Worker, values: Mapping[str, Any], *, tell: Tell = nobody) -> list[dict[str, Any]]:
    """What the worker makes of a request with these fields.

    Raises RequestError for a wrong one, PromptError, and EngineError for numbers that are not finite.
    """
    try:
        request = GenerateRequest.model_validate(values)
    except ValidationError as error:
        raise RequestError(explain(error)[1]) from error
    return _generate(worker, request, tell)


def _generate(worker: Worker, request: GenerateRequest, tell: Tell = nobody) -> list[dict[str, Any]]:
    resolved = resolve(request, worker.components)
    begun = 0

    def next_step() -> bool:
        nonlocal begun
        tell("denoising, steps", done=begun, total=resolved.num_steps)
        begun += 1
        return False

    tell("encoding the prompts")
    (records,) = worker.generate([resolved], stopped=next_step)
    if isinstance(records, Exception):
        raise records
    return records


def save_made(
    folder: Path, stem: str, media: Tensor, *, fps: float | None, audio: Tensor | None, sample_rate: int | None
) -> Path:
    """A picture as PNG, a clip with its sound as WebM; the file. media, audio: as in `Sample`, on any device."""
    return save_media(
        folder,
        stem,
        media.cpu().numpy(),
        fps=fps,
        audio=None if audio is None else audio.float().cpu().numpy(),
        sample_rate=sample_rate,
    )


def local_pipeline(worker: Worker, score: Scorer) -> Pipeline:
    """The pipeline of a run around this worker."""

    async def ask(task: MicrogroupTask) -> Answer:
        return Answer(body=encode_response(_generate(worker, task.request)))

    async def parse(answer: Answer, keys: Sequence[SampleKey]) -> Microgroup:
        return await asyncio.to_thread(to_microgroup, answer, keys)

    def check(task: MicrogroupTask, microgroup: Microgroup, weight_version: int) -> None:
        check_echo(task.request, microgroup.echo, weight_version=weight_version)

    return Pipeline(generate=ask, parse=parse, check=check, score=score)


def sync_in_process(trainer: RlTrainer, worker: Worker, *, version: int) -> None:
    """The trainer's weights into the worker's transformer, verified. Raises SyncError."""
    manifest = trainer.publish(version)
    assert manifest is not None
    verify(manifest, worker.update_from_manifest(manifest), engine="in this process")
    trainer.unpublish()
