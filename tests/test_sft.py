"""SFT: the loss against its formula, the pictures it learns from, and whole runs on a tiny model."""

from __future__ import annotations

import json
import math
import random
import runpy
from collections import Counter
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file
from torch import Tensor

from verst.algorithms.sft import draw_sigmas, noised, velocity_loss
from verst.config import SftRecipe, load_recipe, parse_recipe
from verst.data.text_lines import TextLines
from verst.engine.resolve import resolve
from verst.engine.wire import GenerateRequest, encode_response, to_microgroup
from verst.engine.worker import Worker
from verst.errors import ConfigError, InvariantError, PromptError
from verst.families import ALL_PARTS, Components, recognise
from verst.families.base import to_uint8
from verst.families.tiny import build_tiny
from verst.loops.autoencoder import set_latent_scale, to_pixels, train_autoencoder
from verst.loops.run_folder import RunFolder
from verst.loops.sampling import sample_latents
from verst.loops.sft import train_sft
from verst.loops.sft_data import DrawnBatches
from verst.loops.sft_loss import Sft
from verst.obs.metrics import read_metrics, series
from verst.obs.spans import read_spans
from verst.rewards.ocr import LineReader
from verst.trainer.core import Trainer
from verst.types import SampleKey

ROOT = Path(__file__).parent.parent
GLYPHS = ROOT / "checkpoints" / "glyphs"
FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf")


def load(folder: Path) -> Components:
    return recognise(folder).load(folder, parts=ALL_PARTS, dtype=torch.float32, device=torch.device("cpu"))


# ---------------------------------------------------------------------------------------------------------- the loss


def test_loss_is_the_float64_formula() -> None:
    rng = np.random.default_rng(0)
    v, x0, eps = (rng.standard_normal((3, 4, 2, 5)) for _ in range(3))
    sigma = np.array([0.0, 0.3, 1.0])
    x = np.stack([x0[i] * (1 - sigma[i]) + eps[i] * sigma[i] for i in range(3)])
    loss = [((v[i] - eps[i] + x0[i]) ** 2).sum() / v[i].size for i in range(3)]
    t = {name: torch.tensor(value, dtype=torch.float32) for name, value in (("v", v), ("x0", x0), ("eps", eps))}
    s = torch.tensor(sigma, dtype=torch.float32)
    np.testing.assert_allclose(noised(t["x0"], t["eps"], s).numpy(), x, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(velocity_loss(t["v"], t["x0"], t["eps"]).numpy(), loss, rtol=1e-6)


def test_sigma_draws() -> None:
    numbers = [0.0, 0.25, 0.5, 0.9]
    u = torch.tensor(numbers)
    assert torch.equal(draw_sigmas("uniform", u), u)
    quantiles = [NormalDist().inv_cdf(number) for number in numbers[1:]]
    expected = torch.tensor([0.0, *(1 / (1 + math.exp(-z)) for z in quantiles)])
    torch.testing.assert_close(draw_sigmas("logit_normal", u), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(draw_sigmas("mixed", u), torch.cat([u[:2], expected[2:]]), rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- the pictures


def test_pictures_depend_on_the_seed_alone_and_read_back() -> None:
    captions = ["0123", "4567", "8899", "2222"]
    data = TextLines(captions, FONTS, height=32, width=64)
    texts, media = data.batch(32, seed=5)
    again, same = data.batch(32, seed=5)
    _, other = data.batch(32, seed=6)
    assert media.shape == (32, 1, 32, 64, 3)
    assert media.dtype == torch.uint8
    assert texts == again
    assert torch.equal(media, same)
    assert not torch.equal(media, other)
    assert (media[:, 0, [0, -1]] == 255).float().mean() > 0.95  # nothing is cut off above and below
    read = LineReader(1).read(list(media[:, 0].numpy()))
    assert sum(a == b for a, b in zip(read, texts, strict=True)) >= 31


def test_a_long_caption_still_fits() -> None:
    data = TextLines(["wonderful"], FONTS, height=32, width=64)
    for seed in range(8):
        picture = data.draw("wonderful", random.Random(seed))
        assert (picture[:, 0] > 200).all()
        assert (picture[:, -1] > 200).all()
        assert picture.min() < 100


def test_a_missing_font_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.fonts.*NoSuchFont\.ttf.*give the path"):
        TextLines(["1"], ["NoSuchFont.ttf"], height=32, width=64)


def test_shipped_prompts_are_what_the_script_writes(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "scripts" / "make_glyph_prompts.py"))["main"](tmp_path)
    sets = []
    for name, count in (("train.txt", 4000), ("heldout.txt", 256)):
        text = (ROOT / "data" / "glyphs" / name).read_text()
        assert text == (tmp_path / name).read_text()
        assert len(set(text.split())) == count
        assert all(len(line) == 4 and line.isdecimal() for line in text.split())
        sets.append(set(text.split()))
    assert not sets[0] & sets[1]


# --------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and two prompt files beside it."""
    root = tmp_path_factory.mktemp("sft")
    build_tiny("sd3", root / "model")
    (root / "train.txt").write_text("12\n34\n56\n")
    (root / "heldout.txt").write_text("78\n90\n")
    return root


def tables(tiny: Path, runs: Path, **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "run": {"name": "sft", "folder": str(runs), "iterations": 8, "threads": 1, "device": "cpu"},
        "model": {"path": str(tiny / "model"), "max_sequence_length": 8},
        "sampling": {"height": 32, "width": 32, "num_steps": 2},
        "prompts": {"train": str(tiny / "train.txt"), "heldout": str(tiny / "heldout.txt")},
        "data": {"type": "text_lines", "prompts": str(tiny / "train.txt"), "fonts": ["DejaVuSans.ttf"]},
        "rewards": [{"type": "brightness"}],
        "algorithm": {"type": "sft", "batch_size": 8},
        "trainer": {"tile_size": 4, "lr": 5e-3, "ema_decay": 0.5, "train_text_encoders": True},
        "checkpoint": {"every": 4},
        "eval": {"every": 4, "num_prompts": 2, "grid": 2},
        "trackers": {"tensorboard": False},
    }
    for key, value in changes.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) and key in data else value
    return data


def run(data: dict[str, Any]) -> tuple[Path, list[dict[str, Any]]]:
    """The pipeline folder and the lines of metrics.jsonl."""
    recipe = parse_recipe(data)
    assert isinstance(recipe, SftRecipe)
    folder = RunFolder(recipe)
    try:
        pipeline = train_sft(recipe, folder, quiet=True)
    finally:
        folder.close()
    return pipeline, read_metrics(folder.metrics)


def weights(folder: Path) -> dict[str, Tensor]:
    return {f"{p.parent.name}.{k}": v for p in sorted(folder.rglob("*.safetensors")) for k, v in load_file(p).items()}


def test_a_tracker_without_its_package_is_told_before_the_model_is_looked_at(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verst.loops.trackers._PACKAGES", {"mlflow": ("no_package_has_this_name",)})
    (tmp_path / "empty").mkdir()
    wanted = {"trackers": {"mlflow": {"experiment": "x"}}, "model": {"path": str(tmp_path / "empty")}}
    with pytest.raises(ConfigError, match=r"trackers\.mlflow needs the package no_package_has_this_name"):
        run(tables(tiny, tmp_path, **wanted))


def test_a_run_learns_and_writes_a_pipeline(tiny: Path, tmp_path: Path) -> None:
    pipeline, rows = run(tables(tiny, tmp_path, save_dtype="float16"))
    _, losses = series(rows, "train/loss")
    assert len(losses) == 8
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
    assert series(rows, "reward/heldout")[0] == [0, 4, 8]
    assert {"train/loss_sigma_0", "train/loss_sigma_3"} < {key for row in rows for key in row}

    before, after = weights(tiny / "model"), weights(pipeline)
    assert before.keys() == after.keys()
    moved = {name.split(".")[0] for name, value in after.items() if not torch.equal(value, before[name].to(value))}
    assert moved == {"transformer", "text_encoder", "text_encoder_2", "text_encoder_3"}  # not the autoencoder
    dtypes = {name.split(".")[0]: value.dtype for name, value in after.items()}
    assert dtypes["transformer"] == dtypes["vae"] == torch.float16
    assert dtypes["text_encoder"] == dtypes["text_encoder_3"] == torch.float32
    assert str(tmp_path) not in "".join(p.read_text() for p in pipeline.rglob("*.json"))

    loaded: Any = DiffusionPipeline.from_pretrained(pipeline)
    loaded.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 8}
    image = loaded("12", output_type="pt", **options).images
    assert torch.isfinite(image).all()
    assert json.loads((tmp_path / "sft" / "summary.json").read_text())["iterations"] == 8
    phases = Counter(span.name for span in read_spans(tmp_path / "sft"))
    assert (phases["iteration"], phases["wait"], phases["train"], phases["evaluate"]) == (8, 8, 8, 2)


def test_resumed_is_bitwise_the_same_run(tiny: Path, tmp_path: Path) -> None:
    whole, rows = run(tables(tiny, tmp_path / "a"))
    run(tables(tiny, tmp_path / "b", run={"iterations": 5}))
    resumed, resumed_rows = run(tables(tiny, tmp_path / "b"))
    assert [row["iteration"] for row in resumed_rows] == list(range(9))
    assert series(rows, "train/loss") == series(resumed_rows, "train/loss")
    one, two = weights(whole), weights(resumed)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_lora_is_merged_into_what_is_written(tiny: Path, tmp_path: Path) -> None:
    data = tables(tiny, tmp_path, trainer={"train_text_encoders": False})
    data["model"]["finetune"] = {"type": "lora", "rank": 2, "alpha": 4.0}
    pipeline, _ = run(data)
    before, after = weights(tiny / "model"), weights(pipeline)
    assert before.keys() == after.keys()
    moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert moved
    assert all(".attn." in name and name.endswith("weight") for name in moved)


def test_stop_rule(tiny: Path, tmp_path: Path) -> None:
    pipeline, rows = run(tables(tiny, tmp_path / "met", stop={"reward_at_least": 0.0, "reward_at_most": 1.0}))
    assert rows[-1]["iteration"] == 4  # the first evaluation after a step
    # What is judged is the pipeline as written, here unrounded.
    assert rows[-1]["reward/heldout_saved"] == pytest.approx(rows[-1]["reward/heldout"], abs=1e-6)
    assert json.loads((pipeline.parent / "summary.json").read_text())["early"]
    with pytest.raises(InvariantError, match=r"step 4.*above stop\.reward_at_most = 0\.01.*eval\.every = 4"):
        run(tables(tiny, tmp_path / "passed", stop={"reward_at_least": 0.0, "reward_at_most": 0.01}))
    with pytest.raises(InvariantError, match=r"never reached stop\.reward_at_least = 2\.0 in 8 steps"):
        run(tables(tiny, tmp_path / "never", stop={"reward_at_least": 2.0}))


def test_heldout_prompts_must_not_be_trained_on(tiny: Path, tmp_path: Path) -> None:
    data = tables(tiny, tmp_path, prompts={"heldout": str(tiny / "train.txt")})
    with pytest.raises(PromptError, match=r"3 held-out prompts.*'12'"):
        run(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"tile_size": 3}}, r"trainer\.tile_size = 3 does not divide algorithm\.batch_size = 8.*: 2"),
        ({"trainer": {"ranks": 2}}, r"trainer\.ranks = 2: SFT runs in one process"),
        ({"model": {"dtype": "bfloat16"}}, r"train_text_encoders = true with model\.dtype = .bfloat16.*float32"),
        ({"stop": {"reward_at_most": 0.5}}, r"stop\.reward_at_most = 0\.5 needs a stop\.reward_at_least"),
        ({"eval": {"weights": "ema"}, "trainer": {"ema_decay": None}}, r"eval\.weights = ema needs trainer\.ema_decay"),
    ],
)
def test_wrong_combinations_are_refused(
    tiny: Path, tmp_path: Path, changes: dict[str, dict[str, Any]], message: str
) -> None:
    data = tables(tiny, tmp_path, **changes)
    data = {k: {a: b for a, b in v.items() if b is not None} if isinstance(v, dict) else v for k, v in data.items()}
    with pytest.raises(ConfigError, match=message):
        parse_recipe(data)


def test_families_that_need_more_than_pictures_are_refused(tiny: Path, tmp_path: Path) -> None:
    model = build_tiny("ltx2", tmp_path / "ltx2")
    with pytest.raises(
        ConfigError, match=r"family ltx2, which needs sound or condition images; data\.type = text_lines"
    ):
        run(tables(tiny, tmp_path, model={"path": str(model)}))


def test_tiles_add_up_to_the_batch(tiny: Path, tmp_path: Path) -> None:
    one, four = (parse_recipe(tables(tiny, tmp_path, trainer={"tile_size": size})) for size in (8, 2))
    assert isinstance(one, SftRecipe)
    assert isinstance(four, SftRecipe)
    components = load(tiny / "model")
    components.transformer.requires_grad_(True)
    trainer = Trainer({"transformer": components.transformer}, one.trainer, total_steps=1)
    batches = DrawnBatches(components, TextLines(["12", "34"], FONTS, height=32, width=32), one)
    batch = batches.make(3)
    whole = [tile() for tile in Sft(one, components, trainer).tiles(batch)]
    parts = [tile() for tile in Sft(four, components, trainer).tiles(batch)]
    assert (len(whole), len(parts)) == (1, 4)
    assert sum(float(p.loss) for p in parts) == pytest.approx(float(whole[0].loss), rel=1e-5)
    assert sum(float(p.sums["num/sigma_1"]) for p in parts) == float(whole[0].sums["num/sigma_1"])
    again = batches.make(3)
    assert torch.equal(batch.eps["visual"], again.eps["visual"])
    assert batch.captions == again.captions
    assert not torch.equal(batch.sigmas["visual"], batches.make(4).sigmas["visual"])


def test_the_autoencoder_learns_and_sets_its_scale(tiny: Path) -> None:
    recipe = parse_recipe(tables(tiny, tiny, autoencoder={"steps": 12, "batch_size": 8, "lr": 5e-3}))
    assert isinstance(recipe, SftRecipe)
    components = load(tiny / "model")
    data = TextLines(["12", "34"], FONTS, height=32, width=32)
    losses: list[float] = []
    train_autoencoder(components, data, recipe.autoencoder, seed=0, report=lambda step, m: losses.append(m.loss))
    assert len(losses) == 12
    assert losses[-1] < 0.7 * losses[0]
    _, media = data.batch(64, seed=1)
    set_latent_scale(components.modules["vae"], to_pixels(media, components.device))
    x0 = components.family.encode_media(components, media)["visual"]
    assert float(x0.mean()) == pytest.approx(0, abs=1e-4)
    assert float(x0.std()) == pytest.approx(1, abs=1e-4)


# ------------------------------------------------------------------------------------------------- what verst ships


def glyphs_recipe() -> SftRecipe:
    recipe = load_recipe(ROOT / "recipes" / "glyphs_sft.toml")
    assert isinstance(recipe, SftRecipe)
    return recipe


def test_shipped_checkpoint_is_small_and_names_no_machine() -> None:
    files = [p for p in GLYPHS.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 9e6
    assert not any("_name_or_path" in p.read_text() for p in files if p.suffix == ".json")


def test_shipped_checkpoint_writes_like_the_engine_and_like_diffusers() -> None:
    recipe, prompts, seeds = glyphs_recipe(), ["3415", "3282"], [5, 6]
    worker = Worker(GLYPHS)
    latents = sample_latents(worker.components, prompts, seeds=seeds, sampling=recipe.sampling, max_sequence_length=8)
    with torch.no_grad():
        media = to_uint8(worker.family.decode_pixels(worker.components, latents))
    request = GenerateRequest(
        prompts=tuple(prompts), seeds=tuple(seeds), generator_device="cpu", height=32, width=64, num_inference_steps=10,
        guidance_scale=1.0, max_sequence_length=8, rollout=False, media_format="uint8",
    )  # fmt: skip
    (records,) = worker.generate([resolve(request, worker.components)])
    assert isinstance(records, list)
    keys = [SampleKey(rollout=0, group=0, index=i) for i in range(2)]
    engine = to_microgroup(encode_response(records), keys)
    # The engine encodes each prompt alone, which rounds differently from a batch: at most one of 255 levels.
    difference = torch.stack([one.media for one in engine.samples]).int() - media.int()
    assert difference.abs().max() <= 1

    pipeline: Any = DiffusionPipeline.from_pretrained(GLYPHS)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        prompts, height=32, width=64, num_inference_steps=10, guidance_scale=1.0, max_sequence_length=8,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds], output_type="np",
    ).images  # fmt: skip
    assert np.abs(images * 255 - media[:, 0].numpy()).max() < 2


def test_shipped_autoencoder_keeps_digits_readable() -> None:
    components, recipe = load(GLYPHS), glyphs_recipe()
    data = TextLines([f"{n:04d}" for n in range(10_000)], recipe.data.fonts, height=32, width=64)
    texts, media = data.batch(32, seed=1)
    x0 = components.family.encode_media(components, media)
    assert float(x0["visual"].std()) == pytest.approx(1, abs=0.1)
    rebuilt = to_uint8(components.family.decode_pixels(components, x0))
    read = LineReader(1).read(list(rebuilt[:, 0].numpy()))
    assert sum(a == b for a, b in zip(read, texts, strict=True)) >= 30
