"""Cosmos 3 beyond the contract: sound follows the geometry, sizes stand in the prompt, any scale but 1 guides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import Cosmos3OmniPipeline, UniPCMultistepScheduler
from family_fixtures import generate, request_of, tiny_folder, tiny_worker

from verst.engine.resolve import resolve
from verst.families import recognise
from verst.types import Geometry, Latents


def _rollout(**changes: object) -> dict[str, object]:
    return {"rollout": True, "rollout_return_dit_trajectory": True, "rollout_return_denoising_env": True, **changes}


def test_a_video_has_sound_and_an_image_has_none() -> None:
    worker = tiny_worker("cosmos3")
    video = generate(worker, request_of("cosmos3", **_rollout())).samples[0]
    image = generate(worker, request_of("cosmos3", **_rollout(num_frames=1))).samples[0]
    assert list(video.streams) == ["visual", "audio"]
    assert list(image.streams) == ["visual"]
    assert image.media.shape[0] == 1
    assert not torch.equal(video.streams["audio"].log_probs, torch.zeros(4))


def test_the_prompt_says_size_length_and_side() -> None:
    worker = tiny_worker("cosmos3")
    ids = [
        worker.family.encode_prompts(
            worker.components, ["a cat"], max_sequence_length=64, geometry=geometry, negative=negative
        )["input_ids"].tolist()
        for geometry in (
            Geometry(height=32, width=32, num_frames=5, fps=24.0),
            Geometry(height=32, width=48, num_frames=5, fps=24.0),
            Geometry(height=32, width=32, num_frames=5, fps=12.0),
            Geometry(height=32, width=32),
        )
        for negative in (False, True)
    ]
    assert len({str(row) for row in ids}) == len(ids)


def test_a_scale_below_one_guides_and_one_does_not() -> None:
    worker = tiny_worker("cosmos3-video")
    family = worker.family

    def velocity(scale: float, *, negative: str) -> Latents:
        request = request_of("cosmos3-video", guidance_scale=scale, negative_prompt=negative)
        conditioning = worker._encode([resolve(request, worker.components)])
        assert conditioning.geometry is not None
        shape = family.latent_shapes(worker.components, conditioning.geometry)["visual"]
        x = torch.randn((1, *shape), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return family.velocity(
                worker.components.transformer,
                {"visual": x},
                {"visual": torch.tensor([0.5])},
                conditioning,
                guidance_scale=scale,
            )

    assert torch.equal(velocity(1.0, negative="a")["visual"], velocity(1.0, negative="dogs")["visual"])
    assert not torch.equal(velocity(0.5, negative="a")["visual"], velocity(0.5, negative="dogs")["visual"])


def test_sound_is_the_pipelines() -> None:
    worker = tiny_worker("cosmos3")
    pipeline: Any = Cosmos3OmniPipeline.from_pretrained(tiny_folder("cosmos3"), local_files_only=True)
    shape = worker.family.latent_shapes(worker.components, Geometry(height=32, width=32, num_frames=5))["audio"]
    latents = torch.randn((2, *shape), generator=torch.Generator().manual_seed(1))
    decoded = worker.family.decode_audio(worker.components, {"audio": latents})
    assert decoded is not None
    sound, rate = decoded
    assert rate == 48000
    for row in range(2):
        with torch.no_grad():
            assert torch.allclose(sound[row], pipeline.decode_sound(latents[row]), atol=1e-6)


def test_the_native_schedule_starts_below_one(tmp_path: Path) -> None:
    folder = tmp_path / "cosmos3"
    shutil.copytree(tiny_folder("cosmos3-video"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "use_native_flow_schedule": True}))
    family = recognise(folder)
    components = family.load(
        folder, parts=("transformer", "scheduler"), dtype=torch.float32, device=torch.device("cpu")
    )
    own: Any = UniPCMultistepScheduler.from_pretrained(folder, subfolder="scheduler")
    own.set_timesteps(4, sigmas=np.linspace(1.0 - 1.0 / 1000, 0.0, 5)[:-1])
    grid = family.schedule(components, Geometry(height=32, width=32, num_frames=5), num_steps=4, shift=None)["visual"]
    assert torch.equal(grid.sigmas, own.sigmas)
    assert torch.equal(grid.timesteps, own.timesteps.float())
    assert grid.sigmas[0] < 1
