"""MiniMax H3 beyond the contract: rows that share a layout share a forward, sound, and what it cannot make."""

from __future__ import annotations

import pytest
import torch
from family_fixtures import generate, request_of, run_pipeline, tiny_folder, tiny_worker

from verst.engine.resolve import resolve
from verst.errors import PromptError, RequestError
from verst.families import recognise
from verst.types import Conditioning, Geometry, Latents

NAME = "minimax-h3"
GEOMETRY = Geometry(height=32, width=32, num_frames=124, fps=24.0)
SHORT, LONG = "a red cat on a table", "two big dogs running in the street at night"


def _conditioning(*prompts: str) -> Conditioning:
    worker = tiny_worker(NAME)
    request = request_of(NAME, prompts=prompts, seeds=tuple(range(len(prompts))))
    return worker._encode([resolve(request, worker.components)])


def _velocity(x: Latents, visual: list[float], audio: list[float], conditioning: Conditioning) -> tuple[Latents, int]:
    """The velocity, and how many forwards it took."""
    worker, calls = tiny_worker(NAME), []
    hook = worker.components.transformer.register_forward_hook(lambda *_: calls.append(1))
    sigmas = {"visual": torch.tensor(visual), "audio": torch.tensor(audio)}
    with torch.no_grad():
        v = worker.family.velocity(worker.components.transformer, x, sigmas, conditioning, guidance_scale=1.0)
    hook.remove()
    return v, len(calls)


def _noise(rows: int) -> Latents:
    worker = tiny_worker(NAME)
    generator = torch.Generator().manual_seed(0)
    shapes = worker.family.latent_shapes(worker.components, GEOMETRY)
    return {stream: torch.randn((rows, *shape), generator=generator) for stream, shape in shapes.items()}


@pytest.mark.parametrize(
    ("prompts", "visual", "audio", "forwards"),
    [
        ((SHORT, SHORT, SHORT), [0.5, 0.5, 0.5], [0.2, 0.2, 0.2], 1),
        ((SHORT, LONG, SHORT), [0.5, 0.5, 0.5], [0.2, 0.2, 0.2], 2),
        ((SHORT, LONG, SHORT), [0.5, 0.5, 0.6], [0.2, 0.2, 0.2], 3),
        ((SHORT, SHORT, SHORT), [0.5, 0.5, 0.5], [0.2, 0.3, 0.2], 2),
    ],
)
def test_rows_of_one_layout_share_a_forward(
    prompts: tuple[str, ...], visual: list[float], audio: list[float], forwards: int
) -> None:
    x, conditioning = _noise(3), _conditioning(*prompts)
    together, calls = _velocity(x, visual, audio, conditioning)
    assert calls == forwards
    for row in range(3):
        one = slice(row, row + 1)
        alone, _ = _velocity({k: v[one] for k, v in x.items()}, visual[one], audio[one], conditioning.rows(one))
        for stream, v in alone.items():
            assert (v[0] - together[stream][row]).abs().max() <= 1e-6 * v.abs().max()


def test_pictures_and_sound_are_the_pipelines() -> None:
    """The pipeline's last step is x0 = x + (1 - t) (x0 - eps)."""
    worker, run = tiny_worker(NAME), run_pipeline(NAME)
    last = [steps[-1] for steps in run.streams]
    final = {
        stream: step.sample - (1 - step.timestep) * step.model_output
        for stream, step in zip(worker.family.streams, last, strict=True)
    }
    latents = worker.family.unpack(final, GEOMETRY)
    frames = worker.family.decode_pixels(worker.components, latents)[0].permute(0, 2, 3, 1)
    assert torch.equal(frames, torch.as_tensor(run.media.get("videos")[0]))
    sound = worker.family.decode_audio(worker.components, latents)
    assert sound is not None
    assert torch.equal(sound[0], run.media.get("audio"))
    assert sound[0].shape[1] == 2
    assert sound[1] == run.media.get("sampling_rate") == 32000


def test_a_rollout_takes_as_many_steps_as_asked_for_in_both_streams() -> None:
    sample = generate(
        tiny_worker(NAME), request_of(NAME, rollout_return_dit_trajectory=True, rollout_sde_step_indices=(1,))
    ).samples[0]
    visual, audio = sample.streams["visual"], sample.streams["audio"]
    assert len(visual.sigmas) == len(audio.sigmas) == 5
    assert visual.sigmas[0] == audio.sigmas[0] == 1
    assert visual.sigmas[2] > audio.sigmas[2]
    assert visual.log_probs.nonzero().flatten().tolist() == audio.log_probs.nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_frames": 120}, "nearest: 124"),
        ({"num_frames": 400}, "nearest: 345"),
        ({"height": 40}, "nearest that is: 32"),
        ({"fps": 25.0}, "24 frames a second"),
    ],
)
def test_other_sizes_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(tiny_worker(NAME), request_of(NAME, **change))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(PromptError, match="no tokens"):
        _conditioning("")


def test_a_trainers_parts_load_alone() -> None:
    family = recognise(tiny_folder(NAME))
    components = family.load(
        tiny_folder(NAME), parts=("transformer",), dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert list(components.modules) == ["transformer"]
    assert family.latent_shapes(components, GEOMETRY)["visual"] == (4, 37, 2, 2)
