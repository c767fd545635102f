"""Supervised runs on files: every kind of family, half precision, held-out loss, resume, offline DPO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_fixtures import write_clip, write_picture
from diffusers import DiffusionPipeline
from family_fixtures import tiny_folder
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from verst.algorithms.sft import draw_sigmas, grid_sigmas, min_snr_weight
from verst.config import SftRecipe, parse_recipe
from verst.config.data import FolderData, PreferenceData
from verst.data.bad_files import BadFiles
from verst.data.sources import read_items
from verst.errors import ConfigError, DataError, PromptError
from verst.loops.run_folder import RunFolder
from verst.loops.sft import train_sft
from verst.obs.metrics import read_metrics, series

ROOT = Path(__file__).parent.parent


def tables(model: str, files: Path, runs: Path, /, **changes: Any) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "run": {"name": "run", "folder": str(runs), "iterations": 4, "threads": 1, "device": "cpu"},
        "model": {"path": str(tiny_folder(model)), "max_sequence_length": 8, "long_prompts": "truncate"},
        "sampling": {"height": 32, "width": 32, "num_steps": 2},
        "data": {"type": "folder", "path": str(files), "heldout": 2, "heldout_sigmas": 2},
        "algorithm": {"type": "sft", "batch_size": 4},
        "trainer": {"tile_size": 2, "lr": 5e-3},
        "checkpoint": {"every": 2},
        "eval": {"every": 2},
        "trackers": {"tensorboard": False},
    }
    for key, value in changes.items():
        tables[key] = {**tables.get(key, {}), **value} if isinstance(value, dict) else value
    return tables


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


def moved(before: Path, after: Path) -> set[str]:
    """Names of the parts with a weight that changed."""
    one, two = weights(before), weights(after)
    assert one.keys() == two.keys()
    return {name.split(".")[0] for name in one if not torch.equal(one[name], two[name].to(one[name].dtype))}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for index in range(6):
        write_picture(root / f"{index}.png", height=40 + 8 * index, width=48, seed=index)
        (root / f"{index}.txt").write_text(f"picture {index}")
    return root


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clips")
    for index in range(4):
        write_clip(root / f"{index}.mp4", frames=12 + index, sound_s=0.75)
        (root / f"{index}.txt").write_text(f"clip {index}")
    return root


# ------------------------------------------------------------------------------------------------------- the formulas


def test_more_sigma_draws_and_min_snr() -> None:
    u = torch.tensor([0.0, 0.25, 0.5, 0.999])
    expected = torch.tensor([3 * x / (1 + 2 * x) for x in u.tolist()])
    torch.testing.assert_close(draw_sigmas("shifted", u, shift=3.0), expected)
    noisier = draw_sigmas("logit_normal", u[1:], mean=1.0, std=0.5)
    torch.testing.assert_close(torch.logit(noisier), 1.0 + 0.5 * torch.special.ndtri(u[1:]), rtol=1e-5, atol=1e-5)
    assert grid_sigmas(torch.tensor([1.0, 0.6, 0.2]), u).tolist() == pytest.approx([1.0, 1.0, 0.6, 0.2])
    sigma = torch.tensor([0.0, 0.1, 0.5, 1.0])
    snr = [float("inf"), 81.0, 1.0, 0.0]
    wanted = [1.0 if s == 0 else s**2 * min(r, 5.0) for s, r in zip(sigma.tolist(), snr, strict=True)]
    wanted[0] = 0.0  # gamma sigma^2
    torch.testing.assert_close(min_snr_weight(sigma, 5.0), torch.tensor(wanted))


# --------------------------------------------------------------------------------------------------------- whole runs


def test_heldout_loss_falls_and_a_resumed_run_is_bitwise_the_same(pictures: Path, tmp_path: Path) -> None:
    buckets = {"buckets": {"sizes": [[32, 32], [64, 32]]}, "cache": {"folder": str(tmp_path / "cache")}}
    changes: dict[str, Any] = {"data": buckets, "run": {"iterations": 6}, "trainer": {"ema_decay": 0.5}}
    whole, rows = run(tables("sd3", pictures, tmp_path / "a", **changes))
    _, losses = series(rows, "eval/heldout_loss")
    assert len(losses) == 4
    assert losses[-1] < 0.9 * losses[0]
    assert rows[0]["data/items"] == 4
    assert rows[-1]["data/epoch"] == 6.0
    assert rows[-1]["perf/cache_bytes"] > 0
    run(tables("sd3", pictures, tmp_path / "b", **{**changes, "run": {"iterations": 4}}))
    # Another number of batches ahead, and warm caches instead of cold ones: the same bits.
    again = {**changes, "data": {**buckets, "prefetch": 0}}
    resumed, resumed_rows = run(tables("sd3", pictures, tmp_path / "b", **again))
    keep = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]
    assert keep == [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in resumed_rows]
    one, two = weights(whole), weights(resumed)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert moved(tiny_folder("sd3"), whole) == {"transformer"}


@pytest.mark.parametrize(
    ("dtype", "master"), [("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "forward")]
)
@pytest.mark.parametrize("finetune", [{"type": "full"}, {"type": "lora", "rank": 2, "alpha": 4.0}])
def test_half_precision_trains(
    pictures: Path, tmp_path: Path, dtype: str, master: str, finetune: dict[str, Any]
) -> None:
    trainer = {"lr": 1e-3, "precision": {"master": master}}
    changes: dict[str, Any] = {"model": {"dtype": dtype, "finetune": finetune}, "trainer": trainer}
    pipeline, rows = run(tables("sd3", pictures, tmp_path, **changes))
    _, losses = series(rows, "eval/heldout_loss")
    assert losses[-1] < losses[0]
    assert moved(tiny_folder("sd3"), pipeline) >= {"transformer"}
    assert {value.dtype for name, value in weights(pipeline).items() if name.startswith("transformer.")} == {
        torch.float32
    }


def test_text_encoders_are_trained_on_files(pictures: Path, tmp_path: Path) -> None:
    trainer = {"train_text_encoders": True}
    pipeline, _ = run(
        tables(
            "sd3", pictures, tmp_path, trainer=trainer, data={"cache": {"text": False, "folder": str(tmp_path / "c")}}
        )
    )
    assert {"transformer", "text_encoder"} <= moved(tiny_folder("sd3"), pipeline)
    assert not (tmp_path / "c" / "text").exists()


@pytest.mark.parametrize("model", ["ltx2", "ltx2.3"])
def test_clips_with_sound(clips: Path, tmp_path: Path, model: str) -> None:
    changes: dict[str, Any] = {
        "sampling": {"num_frames": 9, "fps": 24.0},
        "algorithm": {"stream_weights": {"audio": 0.5}, "stream_sigmas": "independent", "batch_size": 2},
        "model": {"max_sequence_length": 48},
        "run": {"iterations": 2},
    }
    pipeline, rows = run(tables(model, clips, tmp_path, **changes))
    last = rows[-1]
    assert last["train/loss"] == pytest.approx((last["train/visual"] + last["train/audio"]) / 2, rel=1e-5)
    assert last["eval/heldout_loss"] < rows[0]["eval/heldout_loss"]
    assert any("audio" in name for name in changed_tensors(tiny_folder(model), pipeline))


def changed_tensors(before: Path, after: Path) -> list[str]:
    one, two = weights(before), weights(after)
    return [name for name in one if not torch.equal(one[name], two[name])]


def test_both_experts_are_trained(clips: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"sampling": {"num_frames": 5}, "algorithm": {"sigma": "grid"}, "run": {"iterations": 3}}
    pipeline, _ = run(tables("wan2.2-a14b", clips, tmp_path, **changes))
    assert moved(tiny_folder("wan2.2-a14b"), pipeline) == {"transformer", "transformer_2"}
    assert DiffusionPipeline.from_pretrained(pipeline).transformer_2 is not None


def test_first_frames_as_condition(clips: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "sampling": {"num_frames": 5},
        "data": {"first_frame_as_condition": True},
        "run": {"iterations": 2},
    }
    _, rows = run(tables("wan2.2-i2v-a14b", clips, tmp_path, **changes))
    assert rows[-1]["eval/heldout_loss"] < rows[0]["eval/heldout_loss"]


def test_an_edit_model_trains_on_pairs_of_pictures(pictures: Path, tmp_path: Path) -> None:
    table = pictures / "edits.jsonl"
    rows = [{"media": f"{i}.png", "caption": f"edit {i}", "source": f"{(i + 1) % 6}.png"} for i in range(3)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "type": "manifest",
        "path": str(table),
        "image": "source",
        "heldout": 1,
        "cache": {"folder": str(tmp_path / "c")},
        "buckets": {"sizes": [[64, 64]], "max_upscale": 2.0},
    }
    changes: dict[str, Any] = {
        "model": {"max_sequence_length": 64},
        "algorithm": {"batch_size": 1, "caption_dropout": 0.0},
        "run": {"iterations": 2},
        "trainer": {"tile_size": 1, "lr": 1e-4},
    }
    pipeline, lines = run(tables("qwen-image-edit", pictures, tmp_path, data=data, **changes))
    table.unlink()
    assert lines[-1]["eval/heldout_loss"] != lines[0]["eval/heldout_loss"]
    assert moved(tiny_folder("qwen-image-edit"), pipeline) == {"transformer"}


@pytest.mark.parametrize("finetune", [{"type": "full"}, {"type": "lora", "rank": 4, "alpha": 8.0}])
def test_offline_dpo_prefers_what_is_preferred(tmp_path: Path, finetune: dict[str, Any]) -> None:
    """The chosen ones are dark, the rejected ones bright."""
    table, rows = tmp_path / "pairs.jsonl", []
    for number in range(24):
        for side, low in (("chosen", 0), ("rejected", 180)):
            pixels = np.random.default_rng(number).integers(low, low + 60, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number}_{side}.png")
        rows.append({"prompt": "x", "chosen": f"{number}_chosen.png", "rejected": f"{number}_rejected.png"})
    table.write_text("\n".join(json.dumps(row) for row in rows))
    reference, lr = ("frozen", 5e-4) if finetune["type"] == "full" else ("adapter_off", 2e-3)
    changes: dict[str, Any] = {
        "data": {"type": "preference_manifest", "path": str(table), "heldout": 8},
        "algorithm": {"type": "dpo_offline", "beta": 200.0, "reference": {"type": reference}},
        "model": {"finetune": finetune},
        "run": {"iterations": 10},
        "trainer": {"lr": lr},
        "eval": {"every": 10},
    }
    _, rows = run(tables("sd3", tmp_path, tmp_path / "runs", **changes))
    first, last = rows[0], rows[-1]
    assert first["eval/heldout_loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert first["eval/preference_accuracy"] == 0.5  # neither is preferred yet
    assert rows[1]["train/loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert last["eval/preference_accuracy"] > 0.9
    assert last["eval/heldout_loss"] < first["eval/heldout_loss"]


def test_a_bad_file_ends_the_run_or_is_counted(pictures: Path, tmp_path: Path) -> None:
    for index in range(6):
        write_picture(tmp_path / "set" / f"{index}.jpg", height=64, width=64, seed=index)
        (tmp_path / "set" / f"{index}.txt").write_text("x")
    whole = (tmp_path / "set" / "2.jpg").read_bytes()
    (tmp_path / "set" / "2.jpg").write_bytes(whole[:900])
    (tmp_path / "set" / "5.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r'5\.jpg: cannot be read.*data\.on_bad_file = "skip"'):
        run(tables("sd3", tmp_path / "set", tmp_path / "stop", data={"heldout": 1}))
    _, rows = run(tables("sd3", tmp_path / "set", tmp_path / "skip", data={"heldout": 1, "on_bad_file": "skip"}))
    assert rows[0]["data/bad_files"] == 1
    assert rows[-1]["data/bad_files"] == 2
    assert sum(row.get("data/replaced", 0) for row in rows) > 0
    named = [
        json.loads(line)["file"] for line in (tmp_path / "skip" / "run" / "bad_files.jsonl").read_text().splitlines()
    ]
    assert named == ["5.jpg", "2.jpg"]


def test_heldout_prompts_must_not_be_captions(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "heldout.txt").write_text("a new one\npicture 3\n")
    changes: dict[str, Any] = {
        "prompts": {"heldout": str(tmp_path / "heldout.txt")},
        "rewards": [{"type": "brightness"}],
    }
    with pytest.raises(PromptError, match=r"1 held-out prompts .* captions of \[data\], e\.g\. 'picture 3'"):
        run(tables("sd3", pictures, tmp_path, **changes))
    (tmp_path / "heldout.txt").write_text("a new one\n")
    _, rows = run(tables("sd3", pictures, tmp_path, **changes, run={"iterations": 1}))
    assert {"reward/heldout", "eval/heldout_loss"} <= rows[-1].keys()


def test_small_data_is_drawn_once_and_alike(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("1234\n5678\n")
    bad = BadFiles(tmp_path / "bad_files.jsonl", "stop")
    make = {"prompts": tmp_path / "lines.txt", "num": 4}
    items = [read_items(FolderData.model_validate({"path": tmp_path / n, "make": make}), bad) for n in ("a", "b", "a")]
    assert [item.caption for item in items[0]] == ["1234", "5678", "1234", "5678"]
    assert [[item.media[0].digest() for item in part] for part in items[:2]] == [
        [i.media[0].digest() for i in items[2]]
    ] * 2
    pairs = read_items(PreferenceData.model_validate({"path": tmp_path / "p" / "t.jsonl", "make": make}), bad)
    assert len(pairs) == 4
    assert all(pair.media[0].digest() != pair.media[1].digest() for pair in pairs)


def test_long_captions_are_counted_where_they_are_cut(pictures: Path, tmp_path: Path) -> None:
    _, rows = run(tables("sd3", pictures, tmp_path, run={"iterations": 1}, model={"max_sequence_length": 2}))
    assert rows[0]["data/truncated_captions"] == 6
    assert rows[0]["eval/truncated_prompts"] == 0


def test_long_captions_are_refused(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"6 prompts do not fit.*'picture 0'"):
        run(tables("sd3", pictures, tmp_path, model={"max_sequence_length": 2, "long_prompts": "refuse"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"heldout": 0}}, r"nothing would be measured.*data\.heldout = 16"),
        ({"rewards": [{"type": "brightness"}]}, r"prompts\.heldout is missing"),
        ({"stop": {"reward_at_least": 0.5}}, r"stop\.reward_at_least = 0\.5 needs a reward"),
        ({"algorithm": {"sigma": "shifted"}}, r"sigma = shifted needs algorithm\.sigma_shift"),
        ({"algorithm": {"type": "dpo_offline"}}, r"dpo_offline with data\.type = folder: use preference_manifest"),
        ({"autoencoder": {"steps": 5}}, r"autoencoder\.steps = 5 with data\.type = folder"),
        (
            {"trainer": {"train_text_encoders": True}, "data": {"cache": {"folder": "c"}}},
            r"data\.cache\.text = true with trainer\.train_text_encoders = true.*set data\.cache\.text = false",
        ),
        ({"data": {"buckets": {"area": 1024, "sizes": [[32, 32]]}}}, r"two ways to say one thing"),
        ({"data": {"on_bad_file": "skp"}}, r"data\.on_bad_file = 'skp': did you mean 'skip'"),
        ({"data": {"type": "fodler"}}, r"data\.type = 'fodler': did you mean 'folder'"),
    ],
)
def test_wrong_combinations_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(tables("sd3", tmp_path, tmp_path, **changes))


def test_stream_weights_of_a_stream_that_is_not_there(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stream_weights names audio; sd3 has the streams visual"):
        run(tables("sd3", pictures, tmp_path, algorithm={"stream_weights": {"audio": 2.0}}))
