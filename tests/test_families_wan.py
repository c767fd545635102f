"""Wan: two experts in one batch, the grid of a multistep scheduler, the first frame, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from family_fixtures import aligned, generate, request_of, tiny_folder, tiny_image, tiny_worker

from verst.engine.resolve import resolve
from verst.engine.worker import Worker
from verst.errors import ModelError, RequestError
from verst.families import recognise
from verst.families.tiny import TINY
from verst.types import Conditioning, Latents


def _inputs(name: str, rows: int) -> tuple[Latents, Conditioning]:
    worker = tiny_worker(name)
    request = request_of(name, prompts=(TINY[name].prompts[0],) * rows, seeds=tuple(range(rows)))
    conditioning = worker._encode([resolve(request, worker.components)])
    assert conditioning.geometry is not None
    shape = worker.family.latent_shapes(worker.components, conditioning.geometry)["visual"]
    return {"visual": torch.randn((rows, *shape), generator=torch.Generator().manual_seed(3))}, conditioning


@pytest.mark.parametrize("name", ["wan2.2-a14b", "wan2.2-i2v-a14b"])
def test_rows_of_both_experts_in_one_batch(name: str) -> None:
    worker = tiny_worker(name)
    latents, conditioning = _inputs(name, 4)
    sigmas = torch.tensor([0.2, 0.95, 0.7, 0.99])

    def velocity(rows: slice) -> torch.Tensor:
        with torch.no_grad():
            return worker.family.velocity(
                worker.components.transformer,
                {"visual": latents["visual"][rows]},
                {"visual": sigmas[rows]},
                conditioning.rows(rows),
                guidance_scale=4.0,
            )["visual"]

    together = velocity(slice(None))
    for row in range(4):
        alone = velocity(slice(row, row + 1))[0]
        assert (alone - together[row]).abs().max() <= TINY[name].batch_bound * alone.abs().max()


def test_the_boundary_belongs_to_the_high_noise_expert() -> None:
    """t >= 875 in whole timesteps: sigma 0.8759 is rounded down to 875."""
    worker = tiny_worker("wan2.2-a14b")
    latents, conditioning = _inputs("wan2.2-a14b", 1)
    experts: Any = worker.components.transformer

    def changes_with(expert: str, sigma: float) -> bool:
        def velocity() -> torch.Tensor:
            with torch.no_grad():
                return worker.family.velocity(
                    experts, latents, {"visual": torch.tensor([sigma])}, conditioning, guidance_scale=1.0
                )["visual"]

        before = velocity()
        weight = experts[expert].proj_out.bias
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(1.0)
        after = velocity()
        with torch.no_grad():
            weight.copy_(kept)
        return not torch.equal(before, after)

    assert changes_with("transformer", 0.8759)
    assert not changes_with("transformer_2", 0.8759)
    assert changes_with("transformer_2", 0.8749)
    assert not changes_with("transformer", 0.8749)


def test_the_grid_is_the_multistep_schedulers() -> None:
    worker = tiny_worker("wan2.1")
    geometry = worker.family.sampling_defaults(worker.components).geometry
    for shift in (None, 7.0):
        ours = worker.family.schedule(worker.components, geometry, num_steps=11, shift=shift)["visual"]
        theirs: Any = UniPCMultistepScheduler.from_config(
            worker.components.modules["scheduler"].config, flow_shift=3.0 if shift is None else shift
        )
        theirs.set_timesteps(11)
        assert torch.equal(ours.sigmas, theirs.sigmas)
        assert torch.equal(ours.timesteps, theirs.timesteps.float())
        assert ours.shift == (3.0 if shift is None else shift)


def test_a_checkpoint_with_eulers_scheduler_makes_the_pipelines_clip(tmp_path: Path) -> None:
    """Such a scheduler gives fractional timesteps, so the transformer is told those."""
    folder = tmp_path / "model"
    pipeline: Any = DiffusionPipeline.from_pretrained(
        tiny_folder("wan2.2-a14b"), scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), local_files_only=True
    )
    aligned(pipeline).save_pretrained(folder)
    tiny = TINY["wan2.2-a14b"]
    frames = pipeline(
        prompt=tiny.prompts[0],
        negative_prompt=tiny.negative_prompt,
        generator=torch.Generator().manual_seed(11),
        output_type="np",
        **tiny.call,
    ).frames[0]
    sample = generate(Worker(folder), request_of("wan2.2-a14b", rollout=False)).samples[0]
    assert torch.equal(sample.media, (torch.from_numpy(frames) * 255).round().to(torch.uint8))
    assert sample.fps == 16.0
    assert sample.audio is None


def test_another_first_frame_gives_another_clip() -> None:
    name = "wan2.2-i2v-a14b"
    first, second = (
        generate(tiny_worker(name), request_of(name, rollout=False, image_path=[str(tiny_image(index))]))
        .samples[0]
        .media
        for index in (0, 1)
    )
    assert not torch.equal(first, second)


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    worker = tiny_worker("wan2.2-a14b")
    with pytest.raises(RequestError, match=r"num_frames = 6 .*nearest that is: 5"):
        resolve(request_of("wan2.2-a14b", num_frames=6), worker.components)
    with pytest.raises(RequestError, match=r"height = 40 .*nearest that is: 32"):
        resolve(request_of("wan2.2-a14b", height=40), worker.components)
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("wan2.2-a14b"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "transformer_2": [None, None]}))
    with pytest.raises(ModelError, match=r"boundary_ratio = 0.875 but no transformer_2"):
        recognise(folder)
