"""Tiny checkpoints of every family, built once a session, and runs of diffusers' own pipelines on them."""

from __future__ import annotations

import functools
import inspect
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

from verst.engine.request import GenerateRequest
from verst.engine.resolve import resolve
from verst.engine.wire import encode_response, to_microgroup
from verst.engine.worker import Worker
from verst.families.loading import align
from verst.families.tiny import TINY, Tiny, build_tiny
from verst.types import Microgroup, SampleKey


@functools.cache
def tiny_folder(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="verst-tiny-")) / name
    return build_tiny(name, folder)


@functools.cache
def tiny_worker(name: str) -> Worker:
    """Shared by tests that change no weight."""
    return Worker(tiny_folder(name))


@functools.cache
def tiny_image(index: int, mode: str = "RGB") -> Path:
    """A picture four times as wide as high, the next four times as high as wide, and so on."""
    height, width = (256, 64) if index % 2 else (64, 256)
    noise = np.random.default_rng(index).integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    path = Path(tempfile.mkdtemp(prefix="verst-tiny-")) / f"{index}-{mode}.png"
    Image.fromarray(noise).save(path)
    return path


def _images_of_call(tiny: Tiny) -> dict[str, Any]:
    pictures = [Image.open(tiny_image(index)).convert(tiny.image_mode) for index in range(tiny.num_images)]
    if not pictures:
        return {}
    return {"image": pictures if len(pictures) > 1 else pictures[0]}


def request_of(name: str, **changes: Any) -> GenerateRequest:
    """The tiny checkpoint's own request, deterministic sampling of its first prompt."""
    tiny = TINY[name]
    base = {**tiny.request, "negative_prompt": tiny.negative_prompt, "media_format": "uint8", "generator_device": "cpu"}
    if "prompts" not in changes:
        base["prompt"] = tiny.prompts[0]
    base["seeds"] = (11,)
    if tiny.num_images:
        base["image_path"] = [str(tiny_image(index)) for index in range(tiny.num_images)]
    return GenerateRequest(**{**base, **changes})


def generate(worker: Worker, request: GenerateRequest) -> Microgroup:
    """Through the wire's own encoding and back, as a trainer gets it."""
    (records,) = worker.generate([resolve(request, worker.components)])
    if isinstance(records, Exception):
        raise records
    keys = [SampleKey(rollout=0, group=0, index=i) for i in range(len(records))]
    return to_microgroup(encode_response(records), keys)


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """What diffusers' pipeline handed one scheduler at one step."""

    sample: Tensor
    model_output: Tensor
    timestep: Tensor


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    streams: list[list[PipelineStep]]
    """One list a scheduler, in the order in which the pipeline first steps them (video before audio)."""
    media: Any
    """The pipeline's output object."""


def plain_pipeline(folder: Path, tiny: Tiny) -> Any:
    """As a user of diffusers loads it."""
    if tiny.load is not None:
        return tiny.load(folder)
    return DiffusionPipeline.from_pretrained(folder, local_files_only=True, **tiny.load_options)


def aligned(pipeline: Any) -> Any:
    """The pipeline, quiet, its weights where verst's own loading puts them: kernels round by where a matrix lies."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            align(part)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def call_pipeline(pipeline: Any, tiny: Tiny, *, prompt: str, seed: int) -> Any:
    """The pipeline's output for what `tiny` asks for, as numpy arrays."""
    takes_negative = "negative_prompt" in inspect.signature(type(pipeline).__call__).parameters
    return pipeline(
        prompt=prompt,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **({"negative_prompt": tiny.negative_prompt} if takes_negative else {}),
        **_images_of_call(tiny),
        **tiny.call,
    )


@functools.cache
def run_pipeline(name: str, *, prompt: str | None = None, seed: int = 11) -> PipelineRun:
    """Plain diffusers on the tiny folder, every scheduler step recorded; media as numpy arrays."""
    tiny = TINY[name]
    folder = tiny_folder(name)
    pipeline = aligned(plain_pipeline(folder, tiny))
    steps: dict[int, list[PipelineStep]] = {}
    scheduler_class = type(pipeline.scheduler)
    original = scheduler_class.step

    @functools.wraps(original)
    def step(self: Any, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        record = PipelineStep(
            sample=sample.clone(),
            model_output=-model_output if tiny.data_minus_noise else model_output.clone(),
            timestep=torch.as_tensor(timestep).clone(),
        )
        steps.setdefault(id(self), []).append(record)
        return original(self, model_output, timestep, sample, *args, **kwargs)

    scheduler_class.step = step
    try:
        media = call_pipeline(pipeline, tiny, prompt=prompt or tiny.prompts[0], seed=seed)
    finally:
        scheduler_class.step = original
    return PipelineRun(streams=list(steps.values()), media=media)


@functools.cache
def velocity_case(name: str, **changes: Any) -> dict[str, Any]:
    """Two prompts of unlike length at unlike noise levels, guided where the family guides. Shared: change nothing."""
    worker = tiny_worker(name)
    job = resolve(
        request_of(name, prompts=("a cat", "a longer prompt of a dog"), seeds=(1, 2), **changes), worker.components
    )
    shapes = worker.family.latent_shapes(worker.components, job.geometry)
    generator = torch.Generator().manual_seed(0)
    return {
        "model": worker.components.folder,
        "conditioning": worker._encode([job]),
        "guidance_scale": job.guidance_scale,
        "latents": {stream: torch.randn((2, *shape), generator=generator) for stream, shape in shapes.items()},
        "sigmas": {stream: torch.tensor([0.9, 0.4]) for stream in shapes},
    }
