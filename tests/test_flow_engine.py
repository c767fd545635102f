"""The controller inside the native engine: all streams reach the trainer, options are carried out and echoed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from engine_fixtures import CPU, folder, made, request  # noqa: F401
from family_fixtures import generate, request_of, tiny_folder, tiny_worker
from torch import Tensor

from verst.algorithms.pairs import joint_log_prob, pair_block, tiles_of
from verst.engine.resolve import resolve
from verst.engine.server import EngineServer
from verst.engine.wire import decode_response, encode_response
from verst.engine.worker import Worker
from verst.errors import EngineError, InvariantError, RequestError
from verst.flow.controller import make_transition
from verst.flow.noise import SampleNoise
from verst.trainer.forward import Forward
from verst.trainer.policies import step_distribution
from verst.types import Latents

JOINT = ["ltx2", "minimax-h3"]
ROLLOUT: dict[str, Any] = {
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
    "share_denoising_env": True,
}


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:  # noqa: F811
    return Worker(folder)


def records_of(worker: Worker, asked: Any) -> list[dict[str, Any]]:
    (result,) = worker.generate([resolve(asked, worker.components)])
    if isinstance(result, EngineError):
        raise result
    return decode_response(encode_response(result))


def records(worker: Worker, **changes: Any) -> list[dict[str, Any]]:
    return records_of(worker, request(**changes))


@pytest.mark.parametrize("name", JOINT)
def test_the_trainer_replays_the_joint_state_exactly(name: str) -> None:
    """One forward of all streams' stored latents gives every stream's log-prob, to the bit."""
    worker = tiny_worker(name)
    microgroup = generate(worker, request_of(name, rollout_sde_step_indices=(0, 2), **ROLLOUT))
    assert list(microgroup.samples[0].streams) == ["visual", "audio"]
    block = pair_block(microgroup, advantages=[1.0], mask=[True])
    forward = Forward(family=worker.family, guidance_scale=microgroup.echo["guidance_scale"], dtype=torch.float32)
    for tile in tiles_of([block], tile_size=1, device=CPU):
        with torch.no_grad():
            steps = step_distribution(
                worker.components.transformer,
                tile,
                forward=forward,
                transition=make_transition("sde", 0.7),
            )
        log_probs = joint_log_prob(steps, tile)
        assert list(log_probs) == ["visual", "audio"]
        for stream, value in log_probs.items():
            assert torch.equal(value, tile.old_log_probs[stream])
            assert value.abs() > 1e-3


@pytest.mark.parametrize("name", JOINT)
def test_every_stream_is_in_the_response_with_or_without_its_trajectory(name: str) -> None:
    worker = tiny_worker(name)
    (whole,) = records_of(worker, request_of(name, rollout_debug_mode=True, **ROLLOUT))
    (short,) = records_of(worker, request_of(name))
    (served,) = records_of(worker, request_of(name, rollout=False))
    assert whole["stream"] == "visual"
    assert list(whole["extra_streams"]) == list(short["extra_streams"]) == ["audio"]
    audio = whole["extra_streams"]["audio"]
    assert {"latents", "latent_step_indices", "sigmas", "timesteps", "grid_timesteps"} <= audio.keys()
    assert audio["debug_tensors"]["rollout_variance_noises"].shape == audio["latents"][:-1].shape
    assert torch.equal(short["extra_streams"]["audio"]["log_probs"], audio["log_probs"])
    assert short["dit_trajectory"] is None
    assert "latents" not in short["extra_streams"]["audio"]
    assert whole["echo"]["extra_stream_sigmas"] == {"audio": audio["sigmas"].tolist()}
    noises = [
        d["rollout_variance_noises"].flatten()[:8] for d in (audio["debug_tensors"], whole["rollout_debug_tensors"])
    ]
    assert not torch.equal(*noises)
    assert served["extra_streams"] == {}
    assert served["rollout_log_probs"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: {"visual": v["visual"]}, r"the velocity have the streams \['visual'\]"),
        (lambda v: {**v, "depth": v["audio"]}, r"\['audio', 'depth', 'visual'\]"),
    ],
)
@pytest.mark.parametrize("serving", [True, False])
def test_a_family_that_drops_or_adds_a_stream_is_an_error(
    change: Callable[[Latents], Latents], message: str, serving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(tiny_folder("ltx2"))
    whole = worker.family.velocity
    monkeypatch.setattr(type(worker.family), "velocity", lambda self, *a, **k: change(whole(*a, **k)))
    with pytest.raises(InvariantError, match=message):
        worker.generate([resolve(request_of("ltx2", rollout=not serving), worker.components)])


def test_a_family_whose_grids_lack_a_stream_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tiny_folder("ltx2"))
    shapes = worker.family.latent_shapes
    monkeypatch.setattr(type(worker.family), "latent_shapes", lambda self, *a: {"visual": shapes(*a)["visual"]})
    with pytest.raises(InvariantError, match="ltx2 declares the streams"):
        worker.generate([resolve(request_of("ltx2"), worker.components)])


def test_log_prob_options_are_carried_out_and_echoed(worker: Worker) -> None:
    stored = records(worker, rollout_storage_dtype="bfloat16")[0]
    drawn = records(worker, rollout_storage_dtype="bfloat16", rollout_log_prob_of="noise")[0]
    total = records(worker, rollout_storage_dtype="bfloat16", rollout_log_prob_reduction="sum")[0]
    assert drawn["echo"]["rollout_log_prob_of"] == "noise"
    assert total["echo"]["rollout_log_prob_reduction"] == "sum"
    assert torch.equal(stored["dit_trajectory"]["latents"], drawn["dit_trajectory"]["latents"])
    assert not torch.equal(stored["rollout_log_probs"], drawn["rollout_log_probs"])
    number = stored["dit_trajectory"]["latents"][0].numel()
    torch.testing.assert_close(total["rollout_log_probs"], stored["rollout_log_probs"] * number, rtol=1e-5, atol=1e-5)
    # SGLang's log-prob is a function of seed, grid and noise level alone.
    other = records(worker, prompt="77", rollout_log_prob_of="noise")[0]
    assert torch.equal(other["rollout_log_probs"], drawn["rollout_log_probs"])


@pytest.mark.parametrize("log_prob_of", ["stored", "noise"])
def test_the_last_cps_step_is_refused_with_the_reason(worker: Worker, log_prob_of: str) -> None:
    asked: dict[str, Any] = {"rollout_sde_type": "cps", "rollout_log_prob_of": log_prob_of}
    for steps in (None, (0, 3)):
        with pytest.raises(RequestError, match=r"last step 3, which has no noise under cps .*leave it out"):
            resolve(request(**asked, rollout_sde_step_indices=steps), worker.components)
    for fine in ({"rollout_sde_step_indices": (0, 2)}, {"rollout_log_prob_no_const": True}):
        assert records(worker, **asked, **fine)[0]["rollout_log_probs"].isfinite().all()


def test_guidance_in_two_passes_differs_by_rounding_alone(worker: Worker) -> None:
    guided: dict[str, Any] = {"guidance_scale": 4.0, "negative_prompt": "7"}
    (one,) = made(worker, request(**guided))
    (two,) = made(worker, request(**guided, guidance_passes="two"))
    paths = [microgroup.samples[0].streams["visual"].latents for microgroup in (one, two)]
    torch.testing.assert_close(paths[0], paths[1], atol=2e-5, rtol=0)
    assert (one.echo["guidance_passes"], two.echo["guidance_passes"]) == ("one_batch", "two")
    options = [resolve(request(**guided, guidance_passes=p), worker.components) for p in ("one_batch", "two")]
    assert options[0].join_key != options[1].join_key
    # Without guidance there is one pass anyway.
    plain = [resolve(request(guidance_passes=p), worker.components).join_key for p in ("one_batch", "two")]
    assert plain[0] == plain[1]


def counted(worker: Worker) -> list[int]:
    """Rows of each forward of the worker's transformer, as they come."""
    rows: list[int] = []
    worker.components.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    return rows


def test_a_branch_is_one_path_until_its_step_and_computed_once(folder: Path) -> None:  # noqa: F811
    """Microgroups of one group, as the plan asks for them with branch steps: equal bits whatever their size."""
    worker = Worker(folder)
    rows = counted(worker)
    asked: dict[str, Any] = {"rollout_sde_step_indices": (2,), "rollout_share_prefix": True}
    groups = [
        made(worker, request(seeds=seeds, initial_seeds=[5] * len(seeds), **asked))[0] for seeds in ((1, 2, 6), (3,))
    ]
    assert rows == [1, 1, 3, 3, 1, 1, 1, 1]
    paths = [sample.streams["visual"] for group in groups for sample in group.samples]
    for step in (0, 1, 2):
        assert all(torch.equal(path.latent_at(step), paths[0].latent_at(step)) for path in paths)
    after = [path.latent_at(3) for path in paths]
    assert all(not torch.equal(a, b) for i, a in enumerate(after) for b in after[:i])
    apart = made(worker, request(seeds=(1, 2, 6), initial_seeds=(5, 5, 5), rollout_sde_step_indices=(2,)))[0]
    for one, other in zip(groups[0].samples, apart.samples, strict=True):
        torch.testing.assert_close(one.streams["visual"].latents, other.streams["visual"].latents, atol=1e-5, rtol=0)
    # The trained step was made in the request's own shape, and replays exactly.
    (tile,) = tiles_of([pair_block(groups[0], advantages=[1.0] * 3, mask=[True] * 3)], tile_size=3, device=CPU)
    for reduction in ("mean", "sum"):
        (again,) = made(
            worker, request(seeds=(1, 2, 6), initial_seeds=(5, 5, 5), rollout_log_prob_reduction=reduction, **asked)
        )
        with torch.no_grad():
            steps = step_distribution(
                worker.components.transformer,
                tile,
                forward=Forward(family=worker.family, guidance_scale=1.0, dtype=torch.float32),
                transition=make_transition("sde", 0.7),
            )
        log_probs = joint_log_prob(steps, tile, reduction=reduction)["visual"]
        assert torch.equal(log_probs, torch.stack([s.streams["visual"].log_probs[2] for s in again.samples]))


def test_requests_of_unlike_prefixes_share_a_batch(folder: Path) -> None:  # noqa: F811
    worker = Worker(folder)
    rows = counted(worker)
    branches = [
        request(
            seeds=seeds, initial_seeds=[9] * len(seeds), rollout_share_prefix=share, rollout_sde_step_indices=(step,)
        )
        for seeds, share, step in (((1, 2), True, 1), ((3, 4, 5), True, 3), ((6, 7), False, 2))
    ]
    joined = made(worker, *branches)
    assert rows == [1 + 1 + 2, 2 + 1 + 2, 2 + 1 + 2, 2 + 3 + 2]
    for together, one in zip(joined, branches, strict=True):
        (alone,) = made(worker, one)
        for a, b in zip(together.samples, alone.samples, strict=True):
            torch.testing.assert_close(a.streams["visual"].latents, b.streams["visual"].latents, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes", [{"seeds": (1, 2)}, {"prompt": None, "prompts": ["1", "2"], "initial_seeds": (3, 3)}]
)
def test_samples_that_part_at_once_share_no_prefix(worker: Worker, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="one path needs one of each"):
        resolve(request(rollout_share_prefix=True, **changes), worker.components)


def test_noise_of_a_sample_does_not_depend_on_its_batch(worker: Worker) -> None:
    def noise(seeds: tuple[int, ...], **changes: Any) -> Tensor:
        rows = records(worker, seeds=seeds, rollout_debug_mode=True, **changes)
        return rows[-1]["rollout_debug_tensors"]["rollout_variance_noises"]

    alone = noise((12,))
    assert torch.equal(alone, noise((11, 12)))
    assert torch.equal(alone, noise((3, 4, 5, 12), prompt="99"))
    source = SampleNoise([12])
    source.initial((4, 4, 8))
    step = source.steps("visual")
    assert torch.equal(alone, torch.stack([step((4, 4, 8))[0] for _ in range(4)]))


def test_guidance_of_a_formula_of_its_own_is_not_cut_in_two(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(worker.family), "unguided_scale", 0.0)
    with pytest.raises(RequestError, match="formula of its own"):
        resolve(request(guidance_scale=3.0, guidance_passes="two"), worker.components)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_served_picture_is_the_pipelines_bit_for_bit(folder: Path, guidance: float) -> None:  # noqa: F811
    """Over HTTP, from the server that `verst serve` runs, between two rollouts of the same engine."""
    server = EngineServer(folder, threads=1)
    server.start()
    server.wait_ready()
    body = {
        "prompt": "1234",
        "negative_prompt": "7",
        "seed": 11,
        "height": 32,
        "width": 64,
        "num_inference_steps": 4,
        "guidance_scale": guidance,
        "max_sequence_length": 16,
    }
    pictures = []
    for rollout in (True, False, True):
        answer = httpx.post(f"{server.url}/rollout/generate", json={**body, "rollout": rollout}, trust_env=False)
        pictures.append(decode_response(answer.content)[0]["generated_output"])
    server.stop()
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    del body["seed"]
    expected = pipeline(**body, generator=torch.Generator().manual_seed(11), output_type="pt").images[0]
    assert torch.equal(pictures[1], expected)
    assert torch.equal(pictures[0], pictures[2])
    assert not torch.equal(pictures[0], pictures[1])
