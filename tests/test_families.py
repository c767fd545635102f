"""What every family must do, on its tiny checkpoint: the same forward as diffusers' pipeline, bit for bit."""

from __future__ import annotations

import diffusers
import pytest
import torch
from family_fixtures import generate, request_of, run_pipeline, tiny_worker

from verst.engine.resolve import resolve
from verst.families.base import to_uint8
from verst.families.tiny import TINY
from verst.types import Conditioning, Latents
from verst.weights.lora import adaptable

VARIANTS = sorted(TINY)


def _conditioning(name: str, *prompts: str) -> Conditioning:
    """Positive and negative conditioning of prompts, as the engine makes it."""
    worker = tiny_worker(name)
    return worker._encode(
        [resolve(request_of(name, prompts=prompts, seeds=tuple(range(len(prompts)))), worker.components)]
    )


def _velocity(name: str, latents: Latents, sigmas: dict[str, torch.Tensor], conditioning: Conditioning) -> Latents:
    worker = tiny_worker(name)
    with torch.no_grad():
        return worker.family.velocity(
            worker.components.transformer,
            latents,
            sigmas,
            conditioning,
            guidance_scale=float(TINY[name].request.get("guidance_scale", 1.0)),
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_velocity_is_what_the_pipeline_hands_its_scheduler(name: str) -> None:
    worker, run = tiny_worker(name), run_pipeline(name)
    family = worker.family
    conditioning = _conditioning(name, TINY[name].prompts[0])
    assert conditioning.geometry is not None
    schedulers = family.schedule(
        worker.components, conditioning.geometry, num_steps=TINY[name].request["num_inference_steps"], shift=None
    )
    assert len(run.streams) == len(family.streams)
    for index in range(len(run.streams[0])):
        packed = {stream: steps[index].sample for stream, steps in zip(family.streams, run.streams, strict=True)}
        sigmas = {stream: schedulers[stream].sigmas[index].expand(1) for stream in family.streams}
        latents = family.unpack({k: v.float() for k, v in packed.items()}, conditioning.geometry)
        ours = family.pack(_velocity(name, latents, sigmas, conditioning), conditioning.geometry)
        for stream, steps in zip(family.streams, run.streams, strict=True):
            assert torch.equal(ours[stream], steps[index].model_output.float()), f"{stream}, step {index}"
            assert torch.equal(family.pack(latents, conditioning.geometry)[stream], packed[stream].float())


@pytest.mark.parametrize("name", VARIANTS)
def test_islands_are_those_that_the_model_is_written_for(name: str) -> None:
    worker = tiny_worker(name)
    for model in adaptable(worker.components.transformer):
        own = getattr(diffusers, type(model).__name__)._keep_in_fp32_modules
        assert set(worker.family.fp32_modules) == set(own or ())


@pytest.mark.parametrize("name", [n for n in VARIANTS if TINY[n].euler])
def test_deterministic_rollout_makes_the_pipelines_media(name: str) -> None:
    frames = run_pipeline(name).media[0]
    expected = torch.from_numpy(frames[0]).reshape(-1, *frames[0].shape[-3:])
    got = generate(tiny_worker(name), request_of(name, rollout=False)).samples[0].media
    expected = TINY[name].as_frames(expected)
    assert got.shape == expected.shape
    assert torch.equal(got, (expected * 255).round().to(torch.uint8))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_is_the_same_alone_and_in_a_batch(name: str) -> None:
    worker = tiny_worker(name)
    both = TINY[name].prompts
    conditioning = _conditioning(name, *both)
    assert conditioning.geometry is not None
    shapes = worker.family.latent_shapes(worker.components, conditioning.geometry)
    generator = torch.Generator().manual_seed(5)
    latents = {stream: torch.randn((2, *shape), generator=generator) for stream, shape in shapes.items()}
    schedulers = worker.family.schedule(worker.components, conditioning.geometry, num_steps=4, shift=None)
    sigmas = {stream: s.sigmas[1].expand(2) for stream, s in schedulers.items()}
    together = _velocity(name, latents, sigmas, conditioning)
    for row in range(2):
        alone = _velocity(
            name,
            {k: v[row : row + 1] for k, v in latents.items()},
            {k: v[:1] for k, v in sigmas.items()},
            _conditioning(name, both[row]),
        )
        for stream, v in alone.items():
            difference = (v[0] - together[stream][row]).abs().max() / v.abs().max()
            assert difference <= TINY[name].batch_bound, (stream, row, float(difference))


@pytest.mark.parametrize("name", VARIANTS)
def test_another_prompt_gives_another_picture(name: str) -> None:
    worker = tiny_worker(name)
    first, second = (
        generate(worker, request_of(name, prompts=(p,), rollout=False, media_format="float")).samples[0].media
        for p in TINY[name].prompts
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", VARIANTS)
def test_media_survive_encode_and_decode(name: str) -> None:
    worker = tiny_worker(name)
    media = generate(worker, request_of(name, rollout=False)).samples[0].media[None]
    x0 = worker.family.encode_media(worker.components, media)
    geometry = _conditioning(name, TINY[name].prompts[0]).geometry
    assert geometry is not None
    shapes = worker.family.latent_shapes(worker.components, geometry)
    assert {k: tuple(v.shape[1:]) for k, v in x0.items()} == {k: shapes[k] for k in x0}
    assert x0["visual"].dtype == torch.float32
    noise = {k: torch.zeros((1, *shape)) for k, shape in shapes.items() if k not in x0}
    again = to_uint8(worker.family.decode_pixels(worker.components, {**x0, **noise}))
    assert again.shape == media.shape
    assert again.dtype == torch.uint8
