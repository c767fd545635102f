"""LTX-2: sound through the engine, all terms of its guidance, two streams at noise levels of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_fixtures import aligned, generate, plain_pipeline, request_of, tiny_folder, tiny_worker

from verst.engine.resolve import resolve
from verst.errors import RequestError
from verst.families.ltx2 import Ltx2, Terms
from verst.families.tiny import TINY
from verst.types import Conditioning, Geometry, Latents


def _inputs(name: str) -> tuple[Latents, Conditioning]:
    worker = tiny_worker(name)
    conditioning = worker._encode([resolve(request_of(name), worker.components)])
    assert conditioning.geometry is not None
    generator = torch.Generator().manual_seed(3)
    shapes = worker.family.latent_shapes(worker.components, conditioning.geometry)
    return {s: torch.randn((1, *shape), generator=generator) for s, shape in shapes.items()}, conditioning


@pytest.mark.parametrize("name", ["ltx2", "ltx2.3"])
def test_sound_is_the_pipelines_own(name: str) -> None:
    pipeline = aligned(plain_pipeline(tiny_folder(name), TINY[name]))
    out = pipeline(
        prompt=TINY[name].prompts[0],
        negative_prompt=TINY[name].negative_prompt,
        generator=torch.Generator().manual_seed(11),
        output_type="np",
        **TINY[name].call,
    )
    sample = generate(tiny_worker(name), request_of(name, rollout=False)).samples[0]
    assert sample.audio is not None
    assert sample.audio.dtype == torch.float32
    assert torch.equal(sample.audio, out.audio[0])
    assert sample.sample_rate == pipeline.vocoder.config.output_sampling_rate
    assert sample.fps == 24.0
    assert sample.audio.std() > 0


def test_every_term_of_the_guidance_is_the_pipelines() -> None:
    """Spatio-temporal guidance in block 1, apart streams and rescaling, with other scales for the sound."""
    name = "ltx2.3"
    scales = {
        "stg_scale": 1.0, "modality_scale": 3.0, "guidance_rescale": 0.7, "audio_guidance_scale": 7.0,
        "audio_stg_scale": 0.5, "audio_modality_scale": 2.0, "audio_guidance_rescale": 0.4,
    }  # fmt: skip
    seen: list[dict[str, torch.Tensor]] = []
    pipeline = aligned(plain_pipeline(tiny_folder(name), TINY[name]))
    convert = pipeline.convert_x0_to_velocity

    def watched(sample: torch.Tensor, x0: torch.Tensor, index: int, scheduler: Any = None) -> torch.Tensor:
        v: torch.Tensor = convert(sample, x0, index, scheduler)
        seen.append({"sample": sample, "velocity": v, "sigma": scheduler.sigmas[index]})
        return v

    pipeline.convert_x0_to_velocity = watched
    call = {**TINY[name].call, **scales, "spatio_temporal_guidance_blocks": [1], "num_inference_steps": 2}
    pipeline(
        prompt=TINY[name].prompts[0],
        negative_prompt=TINY[name].negative_prompt,
        generator=torch.Generator().manual_seed(11),
        output_type="latent",
        **call,
    )
    worker = tiny_worker(name)
    assert isinstance(worker.family, Ltx2)
    family = Ltx2(
        layout=worker.family.layout,
        visual=Terms(stg=1.0, modality=3.0, rescale=0.7),
        audio=Terms(scale=7.0, stg=0.5, modality=2.0, rescale=0.4),
        stg_blocks=(1,),
    )
    _, conditioning = _inputs(name)
    assert conditioning.geometry is not None
    assert len(seen) == 4
    for visual, audio in zip(seen[::2], seen[1::2], strict=True):
        step = {"visual": visual, "audio": audio}
        with torch.no_grad():
            v = family.velocity(
                worker.components.transformer,
                family.unpack({k: s["sample"] for k, s in step.items()}, conditioning.geometry),
                {k: s["sigma"].expand(1) for k, s in step.items()},
                conditioning,
                guidance_scale=3.0,
            )
        for stream, packed in family.pack(v, conditioning.geometry).items():
            assert torch.equal(packed, step[stream]["velocity"]), stream


def test_each_stream_has_its_own_noise_level() -> None:
    name = "ltx2.3"
    worker = tiny_worker(name)
    latents, conditioning = _inputs(name)

    def velocity(visual: float, audio: float) -> Latents:
        sigmas = {"visual": torch.tensor([visual]), "audio": torch.tensor([audio])}
        with torch.no_grad():
            return worker.family.velocity(
                worker.components.transformer, latents, sigmas, conditioning, guidance_scale=3.0
            )

    same, other = velocity(0.8, 0.8), velocity(0.8, 0.3)
    assert not torch.equal(same["audio"], other["audio"])
    assert not torch.equal(same["visual"], other["visual"])  # each stream sees the other's time in cross-attention


def test_a_joint_rollout_records_both_streams() -> None:
    name = "ltx2.3"
    microgroup = generate(
        tiny_worker(name),
        request_of(name, rollout_return_dit_trajectory=True, rollout_return_denoising_env=True),
    )
    streams = microgroup.samples[0].streams
    assert list(streams) == ["visual", "audio"]
    assert streams["visual"].latents.shape[1:] == (4, 2, 4, 4)
    assert streams["audio"].latents.shape[1:] == (2, 5, 4)
    for path in streams.values():
        assert len(path.log_probs) == 4
        assert (path.log_probs != 0).all()
    assert not torch.equal(streams["visual"].log_probs, streams["audio"].log_probs)
    assert microgroup.conditioning.geometry == Geometry(height=32, width=32, num_frames=5, fps=24.0)


def test_frames_a_second_give_the_length_of_the_sound() -> None:
    worker = tiny_worker("ltx2.3")
    lengths = {
        fps: worker.family.latent_shapes(
            worker.components, Geometry(height=32, width=32, num_frames=25, fps=fps)
        )["audio"][1]
        for fps in (12.0, 24.0)
    }  # fmt: skip
    assert lengths == {12.0: 52, 24.0: 26}


def test_what_cannot_be_made_is_refused() -> None:
    worker = tiny_worker("ltx2.3")
    with pytest.raises(RequestError, match=r"max_sequence_length = 50 .*8 registers.*nearest that is: 48"):
        resolve(request_of("ltx2.3", max_sequence_length=50), worker.components)
    with pytest.raises(RequestError, match=r"190464 video tokens .* give sigma_shift"):
        worker.family.schedule(
            worker.components, worker.family.sampling_defaults(worker.components).geometry, num_steps=4, shift=None
        )
    with pytest.raises(RequestError, match=r"num_frames = 6 .*nearest that is: 5"):
        resolve(request_of("ltx2.3", num_frames=6), worker.components)
