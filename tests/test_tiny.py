"""The tiny checkpoints: plain diffusers loads and runs them, verst recognises them, and they are the same every time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from family_fixtures import request_of, tiny_worker
from safetensors.torch import load_file
from torch import Tensor

from verst.engine.resolve import resolve
from verst.errors import ConfigError
from verst.families.tiny import TINY, build_glyphs, build_tiny

SIZE: dict[str, Any] = {"height": 32, "width": 64, "num_inference_steps": 3, "max_sequence_length": 8}


def picture(pipeline: Any, prompt: str, *, guidance: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    images: Tensor = pipeline(
        prompt, negative_prompt="", guidance_scale=guidance, generator=generator, output_type="pt", **SIZE
    ).images
    return images


@pytest.mark.parametrize("name", ["sd3", "sd3.5", "glyphs"])
def test_plain_diffusers_loads_and_repeats(name: str, tmp_path: Path) -> None:
    folder = build_glyphs(tmp_path / name) if name == "glyphs" else build_tiny(name, tmp_path / name)
    pipeline: Any = DiffusionPipeline.from_pretrained(folder)
    assert type(pipeline).__name__ == "StableDiffusion3Pipeline"
    pipeline.set_progress_bar_config(disable=True)
    first = picture(pipeline, "1234")
    assert first.shape == (1, 3, 32, 64)
    assert torch.isfinite(first).all()
    assert torch.equal(first, picture(pipeline, "1234"))
    for other in (picture(pipeline, "77"), picture(pipeline, "1234", seed=1), picture(pipeline, "1234", guidance=5.0)):
        assert (first - other).abs().max() > 0.02  # five of 255 levels


@pytest.mark.parametrize("name", sorted(TINY))
def test_same_seed_same_weights(name: str, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    one, two, three = (build_tiny(name, tmp_path / f"{i}", seed=seed) for i, seed in enumerate((3, 3, 4)))
    assert torch.equal(state, torch.get_rng_state())
    weights = [load_file(f / "transformer/diffusion_pytorch_model.safetensors") for f in (one, two, three)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert any(not torch.equal(weights[0][key], weights[2][key]) for key in weights[0])


@pytest.mark.parametrize("name", sorted(TINY))
def test_verst_recognises_them_and_velocity_is_not_zero(name: str) -> None:
    worker = tiny_worker(name)
    family, components = worker.family, worker.components
    job = resolve(request_of(name, prompts=("12", "cats"), seeds=(0, 1)), components)
    shapes = family.latent_shapes(components, job.geometry)
    x = {s: torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)) for s, shape in shapes.items()}
    sigmas = {s: torch.tensor([1.0, 0.5]) for s in shapes}
    conditioning = dataclasses.replace(worker._encode([job]), negative=None)
    with torch.no_grad():
        v = family.velocity(components.transformer, x, sigmas, conditioning, guidance_scale=1.0)
    for stream, value in v.items():
        assert value.shape == x[stream].shape
        assert value.std() > 0.1


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sd4.*there are: .*sd3"):
        build_tiny("sd4", tmp_path)
    with pytest.raises(ConfigError, match=r"huge.*there are: small, big"):
        build_glyphs(tmp_path, size="huge")
