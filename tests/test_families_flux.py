"""FLUX.1 and FLUX.2 beyond the contract: embedded guidance, distilled checkpoints, reference images, tokenizers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import Flux2Pipeline
from family_fixtures import generate, plain_pipeline, request_of, tiny_folder, tiny_image, tiny_worker
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from verst.engine.resolve import resolve
from verst.engine.worker import Worker
from verst.errors import PromptError, RequestError
from verst.families import recognise
from verst.families.loading import align
from verst.families.tiny import TINY
from verst.families.tiny.flux1 import tiny_flux1
from verst.types import Geometry


def _velocity(worker: Worker, name: str, scale: float) -> Tensor:
    conditioning = worker._encode([resolve(request_of(name), worker.components)])
    assert conditioning.geometry is not None
    assert conditioning.negative is None
    shape = worker.family.latent_shapes(worker.components, conditioning.geometry)["visual"]
    x = {"visual": torch.randn((1, *shape), generator=torch.Generator().manual_seed(0))}
    with torch.no_grad():
        return worker.family.velocity(
            worker.components.transformer, x, {"visual": torch.tensor([0.7])}, conditioning, guidance_scale=scale
        )["visual"]


@pytest.mark.parametrize("name", ["flux1", "flux2"])
def test_guidance_is_an_input_of_the_transformer(name: str) -> None:
    worker = tiny_worker(name)
    assert worker.family.unguided_scale == math.inf
    assert not torch.equal(_velocity(worker, name, 1.0), _velocity(worker, name, 4.0))
    with pytest.raises(RequestError, match=r"true_cfg_scale = 2.0: flux\d has no unconditional side"):
        resolve(request_of(name, guidance_scale=2.0, true_cfg_scale=2.0), worker.components)


def test_schnell_reads_no_guidance(tmp_path: Path) -> None:
    tiny_flux1(guidance_embeds=False).save_pretrained(tmp_path)
    worker = Worker(tmp_path)
    assert torch.equal(_velocity(worker, "flux1", 1.0), _velocity(worker, "flux1", 4.0))


def test_a_distilled_klein_has_no_negative_side(tmp_path: Path) -> None:
    folder = tmp_path / "klein"
    shutil.copytree(tiny_folder("flux2-klein"), folder)
    assert recognise(folder).unguided_scale == 1.0
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "is_distilled": True}))
    worker = Worker(folder)
    assert worker.family.unguided_scale == math.inf
    assert torch.equal(_velocity(worker, "flux2-klein", 1.0), _velocity(worker, "flux2-klein", 4.0))
    assert recognise(tiny_folder("flux2-klein")).unguided_scale == 1.0


def test_the_shift_of_flux2_depends_on_the_number_of_steps() -> None:
    worker, geometry = tiny_worker("flux2"), Geometry(height=1024, width=1024)
    shifts = []
    for steps in (10, 50):
        sigma = worker.family.schedule(worker.components, geometry, num_steps=steps, shift=None)["visual"].sigmas[1]
        t = 1 - 1 / steps
        shifts.append(math.log(float(sigma / (1 - sigma)) * (1 - t) / t))
    assert shifts == pytest.approx([2.2562, 2.0234], abs=1e-3)  # compute_empirical_mu(4096, 10) and (4096, 50)


@pytest.mark.parametrize(("name", "limit"), [("flux1", 64), ("flux2", 96), ("flux2-klein", 48)])
def test_over_long_prompts_are_named(name: str, limit: int) -> None:
    worker = tiny_worker(name)
    with pytest.raises(PromptError, match=rf"prompt 'cat cat.* takes {limit}"):
        resolve(request_of(name, prompts=("cat " * 100,)), worker.components)
    words = 1
    while not worker.family.check_prompts(worker.components, ["cat " * (words + 1)], max_sequence_length=limit):
        words += 1
    rows = [
        worker.family.encode_prompts(worker.components, ["cat " * words + end], max_sequence_length=limit)
        for end in ("", "cat")
    ]
    assert not torch.equal(rows[0]["encoder_hidden_states"], rows[1]["encoder_hidden_states"])


def test_flux2_without_reference_images_is_the_pipeline() -> None:
    worker, tiny = tiny_worker("flux2"), TINY["flux2"]
    pipeline = plain_pipeline(tiny_folder("flux2"), tiny)
    assert isinstance(pipeline, Flux2Pipeline)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            align(part)
    pipeline.set_progress_bar_config(disable=True)
    (expected,) = pipeline(
        prompt=tiny.prompts[0], generator=torch.Generator().manual_seed(11), output_type="np", **tiny.call
    ).images
    got = generate(worker, request_of("flux2", rollout=False, image_path=None)).samples[0].media[0]
    assert torch.equal(got, (torch.from_numpy(expected) * 255).round().to(torch.uint8))


def test_reference_images_of_flux2_keep_their_size_up_to_a_million_pixels(tmp_path: Path) -> None:
    worker = tiny_worker("flux2")
    sizes = {}
    for name, (width, height) in {"odd": (250, 70), "large": (2100, 1050)}.items():
        Image.fromarray(np.zeros((height, width, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
        free = request_of("flux2", image_path=[str(tmp_path / f"{name}.png"), str(tiny_image(0))])
        geometry = resolve(free.model_copy(update={"height": None, "width": None}), worker.components).geometry
        sizes[name] = (geometry.width, geometry.height)
    assert sizes == {"odd": (240, 64), "large": (1440, 720)}
    Image.fromarray(np.zeros((60, 90, 3), dtype=np.uint8)).save(tmp_path / "small.png")
    with pytest.raises(RequestError, match=r"Image too small: 90.60"):
        generate(worker, request_of("flux2", image_path=[str(tmp_path / "small.png")]))


def test_a_llama_tokenizer_of_flux2_splits_as_its_file_says(tmp_path: Path) -> None:
    """Inside a processor transformers 5 reads tokenizer.json as it stands; by its own name it would not."""
    folder = tmp_path / "flux2"
    shutil.copytree(tiny_folder("flux2"), folder)
    config = folder / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "LlamaTokenizerFast"}))
    family = recognise(folder)
    loaded = family.load(folder, parts=("text",), dtype=torch.float32, device=torch.device("cpu"))
    text = "two big dogs running in the street, at night\n"
    expected = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")).encode(text).ids
    assert loaded.modules["tokenizer"].tokenizer(text)["input_ids"] == expected
    rows = [
        family.encode_prompts(components, [text], max_sequence_length=96)["encoder_hidden_states"]
        for components in (loaded, tiny_worker("flux2").components)
    ]
    assert torch.equal(*rows)
