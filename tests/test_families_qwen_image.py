"""The Qwen-Image lineage beyond the contract: shifts, layers, mixed text lengths, condition images of 2.1."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from diffusers import QwenImage21Pipeline
from family_fixtures import generate, plain_pipeline, request_of, tiny_folder, tiny_image, tiny_worker
from PIL import Image
from torch import Tensor

from verst.engine.resolve import resolve
from verst.errors import PromptError, RequestError
from verst.families.loading import align
from verst.families.qwen_image_layered import _flattened
from verst.families.tiny import TINY
from verst.types import Geometry

LAYERED, V21 = "qwen-image-layered", "qwen-image-2.1"


@pytest.mark.parametrize(
    ("name", "prefix"), [("qwen-image", 34), ("qwen-image-edit", 64), ("qwen-image-edit-plus", 64)]
)
def test_the_tiny_tokenizer_gives_the_template_as_many_tokens_as_the_pipeline_cuts_off(name: str, prefix: int) -> None:
    worker = tiny_worker(name)
    pipeline = worker.family.pipeline(worker.components)
    template = pipeline.prompt_template_encode.split("<|vision_start|>")[0].split("{}")[0]
    assert pipeline.prompt_template_encode_start_idx == prefix
    assert len(worker.components.modules["tokenizer"](template)["input_ids"]) == prefix


def test_over_long_prompts_are_named() -> None:
    worker = tiny_worker("qwen-image")
    with pytest.raises(PromptError, match=r"prompt 'cat cat.* has \d+ tokens, the model takes 64"):
        resolve(request_of("qwen-image", prompts=("cat " * 80,)), worker.components)
    with pytest.raises(PromptError, match="the model takes 1024"):
        resolve(request_of("qwen-image", prompts=("cat " * 1100,), max_sequence_length=2000), worker.components)


@pytest.mark.parametrize("name", ["qwen-image", LAYERED, V21])
def test_a_given_shift_replaces_the_one_that_follows_the_size(name: str) -> None:
    worker = tiny_worker(name)
    geometry = resolve(request_of(name), worker.components).geometry
    scheduler = worker.family.schedule(worker.components, geometry, num_steps=4, shift=3.0)["visual"]
    assert scheduler.shift == 3.0
    s = torch.linspace(1, 0 if name == LAYERED else 0.25, 5 if name == LAYERED else 4)[:4].double()
    expected = 3 * s / (1 + 2 * s)
    if name != LAYERED:  # stretched to end at 0.02
        expected = 1 - (1 - expected) * (1 - 0.02) / (1 - expected[-1])
    assert torch.allclose(scheduler.sigmas[:4].double(), expected, atol=1e-6)


def test_guidance_keeps_the_norm_of_the_conditional_side() -> None:
    worker = tiny_worker("qwen-image")
    conditioning = worker._encode([resolve(request_of("qwen-image"), worker.components)])
    geometry = conditioning.geometry
    assert geometry is not None
    shape = worker.family.latent_shapes(worker.components, geometry)["visual"]
    x = {"visual": torch.randn((1, *shape), generator=torch.Generator().manual_seed(0))}

    def norms(scale: float) -> Tensor:
        with torch.no_grad():
            v = worker.family.velocity(
                worker.components.transformer, x, {"visual": torch.ones(1)}, conditioning, guidance_scale=scale
            )
        return worker.family.pack(v, geometry)["visual"].norm(dim=-1)

    assert torch.allclose(norms(1.0), norms(6.0), rtol=1e-5)


def test_two_passes_by_the_plain_formula_are_refused() -> None:
    with pytest.raises(RequestError, match="qwen_image guides by a formula of its own"):
        resolve(request_of("qwen-image", guidance_passes="two"), tiny_worker("qwen-image").components)


def test_layers_over_one_another_are_the_whole_picture() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = torch.rand((1, 3, 4, 2, 2), generator=generator)
    layers[:, 0, 3] = 1
    out = _flattened(layers)
    expected = layers[:, 0, :3]
    for layer in (layers[:, 1], layers[:, 2]):
        expected = layer[:, :3] * layer[:, 3:] + expected * (1 - layer[:, 3:])
    assert torch.allclose(out[:, :3], expected, atol=1e-6)
    assert torch.allclose(out[:, 3], torch.ones(()), atol=1e-6)


def test_a_layer_is_two_frames_and_its_size_is_the_pictures() -> None:
    worker = tiny_worker(LAYERED)
    job = resolve(request_of(LAYERED), worker.components)
    assert (job.geometry.height, job.geometry.width, job.geometry.num_frames) == (320, 1280, 2)
    media = generate(worker, request_of(LAYERED, rollout=False)).samples[0].media
    assert media.shape == (4, 320, 1280, 3)
    opacity = media[1::2]
    assert torch.equal(opacity[..., :1].expand_as(opacity), opacity)
    with pytest.raises(RequestError, match="would distort a picture of 64 by 256 pixels"):
        generate(worker, request_of(LAYERED, height=640, width=640))


def test_rows_of_unlike_text_length_give_in_2_1_what_they_give_alone() -> None:
    worker = tiny_worker(V21)
    prompts = (*TINY[V21].prompts, TINY[V21].prompts[0])
    jobs = [resolve(request_of(V21, prompts=prompts, seeds=(1, 2, 3)), worker.components)]
    jobs += [resolve(request_of(V21, prompts=(p,)), worker.components) for p in prompts]
    shape = worker.family.latent_shapes(worker.components, jobs[0].geometry)["visual"]
    x = torch.randn((3, *shape), generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([1.0, 0.7, 0.2])

    def velocity(x: Tensor, sigma: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            return worker.family.velocity(
                worker.components.transformer,
                {"visual": x},
                {"visual": sigma},
                worker._encode([jobs[index]]),
                guidance_scale=4.0,
            )["visual"]

    together = velocity(x, sigma, 0)
    for row in range(3):
        alone = velocity(x[row : row + 1], sigma[row : row + 1], row + 1)
        assert (together[row] - alone[0]).abs().max() <= 1e-6 * alone.abs().max()


def test_condition_images_of_2_1_as_in_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, tiny = tiny_worker(V21), TINY[V21]
    monkeypatch.setattr(worker.family, "area", 64 * 64, raising=False)
    worker.prompt_cache.clear()
    pipeline = plain_pipeline(tiny_folder(V21), tiny)
    assert isinstance(pipeline, QwenImage21Pipeline)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            align(part)
    pipeline.set_progress_bar_config(disable=True)
    paths = [tiny_image(0), tiny_image(1)]
    (expected,) = pipeline(
        tiny.prompts[0],
        [Image.open(path) for path in paths],
        negative_prompt=tiny.negative_prompt,
        generator=torch.Generator().manual_seed(11),
        output_resolution=64,
        output_type="np",
        **tiny.call,
    ).images
    request = request_of(V21, rollout=False, image_path=[str(path) for path in paths])
    got = generate(worker, request).samples[0].media
    assert torch.equal(got, (tiny.as_frames(torch.from_numpy(expected)[None]) * 255).round().to(torch.uint8))
    free = request.model_copy(update={"height": None, "width": None})
    assert resolve(free, worker.components).geometry == Geometry(height=128, width=32)
    worker.prompt_cache.clear()


def test_a_checkpoint_with_sigmas_of_its_own_has_its_own_number_of_steps(tmp_path) -> None:
    worker = tiny_worker(V21)
    own = dataclasses.replace(worker.components, folder=tmp_path)
    (tmp_path / "model_index.json").write_text('{"sample_sigmas": [1.0, 0.5]}')
    geometry = Geometry(height=64, width=64)
    assert worker.family.sampling_defaults(own).num_steps == 2
    grid = worker.family.schedule(own, geometry, num_steps=2, shift=1.0)["visual"].sigmas
    assert math.isclose(grid[1], 0.02, abs_tol=1e-6)
    with pytest.raises(RequestError, match="num_inference_steps = 4, but this checkpoint has sigmas for 2 steps"):
        worker.family.schedule(own, geometry, num_steps=4, shift=None)
