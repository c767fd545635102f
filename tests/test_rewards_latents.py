"""Rewards of latents: exact values, what is asked of an engine, and a whole run whose autoencoder cannot decode."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import folder, made, request  # noqa: F401
from family_fixtures import tiny_worker
from run_fixtures import metric_rows, recipe_with, run_to_end
from safetensors.torch import load_file, save_file
from test_pipeline import microgroup_of, task_of
from torch import Tensor

from verst.config import load_recipe
from verst.config.recipe import RlRecipe
from verst.config.rewards import LatentReward
from verst.engine.client import check_echo
from verst.engine.resolve import resolve
from verst.engine.wire import GenerateRequest
from verst.engine.worker import Worker
from verst.errors import ConfigError, EchoError, EngineError, RequestError, RewardError
from verst.loops.evaluate import evaluate_model
from verst.rewards import RewardBatch, make_reward
from verst.rollout.plan import MicrogroupTask, plan_evaluation, plan_rollout
from verst.rollout.prompts import Prompt, PromptSource
from verst.rollout.scoring import reward_batch
from verst.types import Microgroup, Sample, StreamTrajectory

ROOT = Path(__file__).parents[1]
LATENT = '{type="latent", path="run_rewards:calm"}'
BRIGHT = '{type="brightness"}'


def mean(latents: Mapping[str, Tensor], prompts: Sequence[str], factor: float = 1.0) -> list[float]:
    return [factor * float(x.mean()) + len(p) for x, p in zip(latents["visual"], prompts, strict=True)]


def one(latents: Mapping[str, Tensor], prompt: str, *, metadata: Mapping[str, Any], fps: float) -> float:
    return float(latents["visual"].mean() + latents["audio"].sum()) + metadata["worth"] + fps


def whole(batch: RewardBatch) -> list[float]:
    assert batch.latents is not None
    return [float(x.amax()) for x in batch.latents["visual"]]


def sounding(latents: Mapping[str, Tensor], prompts: Sequence[str], audio: Tensor) -> list[float]:
    return [0.0 for _ in prompts]


def late_batch() -> RewardBatch:
    """Two clips that nobody decoded."""
    visual = torch.stack([torch.full((4, 2, 3, 3), 0.25), torch.full((4, 2, 3, 3), -0.5)])
    return RewardBatch(
        media=torch.zeros(2, 0, 24, 24, 3, dtype=torch.uint8),
        prompts=("a", "bb"),
        metadata=({"worth": 10.0}, {"worth": 20.0}),
        fps=8.0,
        latents={"visual": visual, "audio": torch.ones(2, 5, 7)},
    )


def own(name: str, **keys: Any) -> Any:
    return make_reward(LatentReward(path=f"{__name__}:{name}", **keys))


def test_a_function_gets_latents_prompts_and_what_it_names() -> None:
    batch = late_batch()
    assert own("mean", options={"factor": 2.0}).score(batch) == [1.5, 1.0]
    assert own("one", batched=False).score(batch) == [0.25 + 35 + 10 + 8, -0.5 + 35 + 20 + 8]
    assert own("whole").score(batch) == [0.25, -0.5]
    assert own("mean").score(batch.rows([1])) == [1.5]
    assert RewardBatch.join([batch, batch.rows([0])]).latents["visual"].shape == (3, 4, 2, 3, 3)  # type: ignore[index]
    with pytest.raises(RewardError, match="reward latent reads final latents, and the samples come without them"):
        own("mean").score(RewardBatch.plain(torch.zeros(1, 1, 4, 4, 3, dtype=torch.uint8), ["a"]))


def test_the_example_of_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "rewards.md").read_text().split("## Of latents")[1]
    (tmp_path / "my_latents.py").write_text(text.split("```python\n")[1].split("```")[0])
    table = tomllib.loads(text.split("```toml\n")[1].split("```")[0])["rewards"][0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    batch = dataclasses.replace(late_batch(), latents={"visual": torch.tensor([[0.0, 2.0], [1.0, 1.0]])})
    assert make_reward(LatentReward(**table)).score(batch) == pytest.approx([0.8 - 2**0.5, -0.8])


def test_what_a_reward_of_latents_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"callable as f\(latents, prompts, \*\*options\).*audio"):
        own("sounding")
    with pytest.raises(RewardError, match=r"media of shape \[B, F, H, W, 3\], got \[1, 0, 4, 4, 3\]"):
        RewardBatch.plain(torch.zeros(1, 0, 4, 4, 3, dtype=torch.uint8), ["a"])


def path_of(final: Tensor, *, kept: Sequence[int] = (4,)) -> StreamTrajectory:
    grid = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    return StreamTrajectory(
        latents=torch.stack([final + 4 - step for step in kept]),
        latent_step_indices=torch.tensor(kept),
        sigmas=grid,
        timesteps=grid,
        log_probs=torch.zeros(4),
        sde_step_indices=(),
    )


def with_streams(*streams: dict[str, StreamTrajectory]) -> tuple[MicrogroupTask, Microgroup]:
    task = task_of(0, 0)
    plain = microgroup_of(task.keys)
    samples: list[Sample] = [dataclasses.replace(s, streams=x) for s, x in zip(plain.samples, streams, strict=True)]
    return task, dataclasses.replace(plain, samples=tuple(samples))


def test_the_final_latents_of_every_stream_are_what_a_reward_gets() -> None:
    final = torch.full((4, 2, 2), 0.5, dtype=torch.bfloat16)
    streams = [
        {"visual": path_of(final * i, kept=(1, 2, 4)), "audio": path_of(torch.full((3, 6), float(i)))} for i in (1, 2)
    ]
    batch = reward_batch(*with_streams(*streams), latents=True)
    assert batch.latents is not None
    assert batch.latents["visual"].dtype == torch.float32
    assert batch.latents["visual"].flatten(1).unique(dim=1).tolist() == [[0.5], [1.0]]
    assert batch.latents["audio"].shape == (2, 3, 6)
    assert reward_batch(*with_streams(*streams)).latents is None


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ({}, r"come as \[C, H, W\] or \[C, F, H, W\] in stream visual; the engine sent none"),
        ({"visual": path_of(torch.zeros(16, 64))}, r"the engine sent \[16, 64\]: tokens that are packed"),
        ({"visual": path_of(torch.zeros(4, 2, 2), kept=(0, 1))}, "the engine sent none of stream visual.*step 4"),
    ],
)
def test_latents_that_are_absent_or_packed_stop_the_run(streams: dict[str, StreamTrajectory], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        reward_batch(*with_streams(streams, streams), latents=True)


def plans(folder: Path, *overrides: str) -> tuple[GenerateRequest, GenerateRequest]:  # noqa: F811
    """A request of a rollout, and one of an evaluation."""
    recipe = recipe_with(folder, *overrides)
    source = PromptSource(recipe.prompts.train, seed=0, shuffle=True)
    (held_out,) = plan_evaluation(recipe, [Prompt(text="a", index=0)])
    return plan_rollout(recipe, source, 0)[0].request, held_out.request


def test_what_is_decoded_follows_from_who_looks(tmp_path: Path) -> None:
    def decoded(*overrides: str) -> tuple[bool, bool]:
        train, held_out = plans(tmp_path, *overrides)
        return train.return_media, held_out.return_media

    alone = f"rewards=[{LATENT}]"
    gold = f"watch.gold=[{BRIGHT}]"
    base = "eval={every=100, num_prompts=2, batch_size=2}"
    assert decoded(alone, base) == (False, False)
    assert decoded(alone) == (False, True)  # the tests' recipe asks for a grid of 2
    assert decoded(alone, base, gold) == (False, True)
    assert decoded(alone, base, gold, "watch.gold_on_training_every=3") == (True, True)
    assert decoded(f"rewards=[{LATENT}, {BRIGHT}]", base) == (True, True)
    assert decoded(base) == (True, True)


def test_final_latents_are_asked_for_where_they_are_read(tmp_path: Path) -> None:
    train, held_out = plans(tmp_path, f"rewards=[{LATENT}, {BRIGHT}]")
    assert train.rollout_return_step_indices is not None
    assert train.rollout_return_step_indices[-1] == 4
    assert (held_out.rollout_sde_type, held_out.rollout_return_step_indices) == ("ode", (4,))
    train, held_out = plans(tmp_path)
    assert train.rollout_return_step_indices is not None
    assert 4 not in train.rollout_return_step_indices
    assert not held_out.rollout


def test_a_recipe_cannot_watch_pictures_that_nobody_makes(tmp_path: Path) -> None:
    alarm = 'watch.alarms=[{type="diversity_collapse"}]'
    with pytest.raises(ConfigError, match="diversity_collapse can never be raised: all rewards are of latents"):
        recipe_with(tmp_path, f"rewards=[{LATENT}]", alarm)
    recipe_with(tmp_path, f"rewards=[{LATENT}, {BRIGHT}]", alarm)


class Decodes(AssertionError):
    pass


def forbid_decoding(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Decodes

    for name in ("decode_pixels", "decode_audio"):
        if hasattr(worker.family, name):
            monkeypatch.setattr(worker.family, name, refuse)


def test_an_engine_that_is_told_so_decodes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    worker = Worker(folder)
    (plain,) = made(worker, request())
    forbid_decoding(worker, monkeypatch)
    with pytest.raises(Decodes):
        made(worker, request())
    asked = request(return_media=False)
    (bare,) = made(worker, asked)
    for sample, other in zip(bare.samples, plain.samples, strict=True):
        assert (sample.media.shape, sample.audio) == ((0, 32, 64, 3), None)
        assert torch.equal(sample.streams["visual"].latents, other.streams["visual"].latents)
    check_echo(asked, bare.echo)
    with pytest.raises(EchoError, match="return_media: False was asked for, the engine used True"):
        check_echo(asked, plain.echo)
    for nothing in ({"rollout": False}, {"rollout_return_dit_trajectory": False}):
        with pytest.raises(RequestError, match="return_media = false leaves nothing to return"):
            resolve(request(return_media=False, **nothing), worker.components)


def test_clips_with_sound_stay_latents_too(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tiny_worker("ltx2")
    forbid_decoding(worker, monkeypatch)
    sizes = {"height": 64, "width": 64, "num_frames": 9, "fps": 8.0, "max_sequence_length": None}
    (bare,) = made(worker, request(return_media=False, num_inference_steps=2, **sizes))
    task = task_of(0, 0)
    batch = reward_batch(dataclasses.replace(task, prompts=("1234",) * 2), bare, latents=True)
    assert batch.latents is not None
    assert (batch.latents["visual"].ndim, batch.latents["audio"].ndim) == (5, 4)
    assert (batch.media.shape[1], batch.audio, batch.sample_rate) == (0, None, None)
    final = bare.samples[1].streams["audio"].latent_at(2)
    assert torch.equal(batch.latents["audio"][1], final.float())


def test_an_evaluation_that_keeps_latents_gives_the_pictures_of_plain_sampling(folder: Path) -> None:  # noqa: F811
    worker = Worker(folder)
    (plain,) = made(worker, request(rollout=False, rollout_return_dit_trajectory=False))
    kept: dict[str, Any] = {"rollout_sde_type": "ode", "rollout_return_step_indices": (4,)}
    (with_latents,) = made(worker, request(**kept))
    for sample, other in zip(with_latents.samples, plain.samples, strict=True):
        assert torch.equal(sample.media, other.media)


def glyphs_that_cannot_decode(folder: Path) -> Path:  # noqa: F811
    """The shipped model with a broken decoder: every picture of it would be NaN, which an engine reports."""
    copy = folder / "glyphs"
    shutil.copytree(ROOT / "checkpoints" / "glyphs", copy)
    (file,) = (copy / "vae").glob("*.safetensors")
    tensors = load_file(file)
    broken = {n: torch.full_like(t, torch.nan) if n.startswith("decoder.") else t for n, t in tensors.items()}
    assert broken.keys() == tensors.keys()
    save_file(broken, file, metadata={"format": "pt"})
    return copy


@pytest.mark.ray
def test_a_run_of_the_glyph_recipe_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here_first = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", here_first)
    # A Ray that is there already is not the run's: without cluster.address it starts its own.
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    overrides = [
        f"model.path={glyphs_that_cannot_decode(tmp_path)}",
        f"prompts.train={ROOT / 'data' / 'glyphs' / 'train.txt'}",
        f"prompts.heldout={ROOT / 'data' / 'glyphs' / 'heldout.txt'}",
        f"rewards=[{LATENT}]",
        f"run.folder={tmp_path / 'runs'}",
        "run.name=run",
        "run.iterations=1",
        "rollout.num_groups=2",
        "rollout.group_size=4",
        "rollout.microgroup_size=4",
        "trainer.tile_size=4",
        "eval={every=1, num_prompts=4, batch_size=4}",
        "cluster.num_cpus=2",
    ]
    path = ROOT / "recipes" / "glyphs_grpo.toml"
    recipe = load_recipe(path, overrides)
    assert isinstance(recipe, RlRecipe)
    worker = Worker(recipe.model.path)
    with pytest.raises(EngineError, match="decoded pixels"):
        made(worker, request(max_sequence_length=8))
    code, output = run_to_end(path, *overrides)
    assert code == 0, output
    assert output.count("all rewards are of latents: nothing is decoded") == 1
    run = tmp_path / "runs" / "run"
    rows = metric_rows(run)
    before, after = rows
    assert after["policy/ratio_max_deviation"] == 0.0
    assert after["train/grad_norm"] > 0
    assert after["reward/train_std"] > 0
    assert "rollout/diversity" not in after
    assert before["reward/heldout"] != after["reward/heldout"]
    assert list((run / "samples").iterdir()) == []
    assert (run / "reward_curve.png").exists()
    again = asyncio.run(evaluate_model(recipe, checkpoint=None, ema=False))
    assert again["reward/heldout"] == pytest.approx(before["reward/heldout"], abs=1e-6)
