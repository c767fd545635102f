"""Batches by position, caches on disk, work ahead of time, and what happens to bad files on the way."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_fixtures import write_clip, write_float_sound, write_picture, write_sound
from family_fixtures import tiny_folder, tiny_image, tiny_worker
from hypothesis import given, settings
from hypothesis import strategies as st

from verst.config.data import FolderData, ManifestData
from verst.data.bad_files import BadFiles
from verst.data.cache import TensorCache, folder_fingerprint
from verst.data.dataset import FileDataset
from verst.data.encode import Encoder, encoder_fingerprint
from verst.data.order import Order
from verst.data.prefetch import Prefetcher
from verst.errors import ConfigError, DataError
from verst.families import ALL_PARTS, Components, recognise

# -------------------------------------------------------------------------------------------------------------- order


@settings(max_examples=40, deadline=None)
@given(
    counts=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 7), min_size=1),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_in_one_round_every_item_comes_batch_size_times(counts: dict[str, int], batch_size: int, seed: int) -> None:
    order = Order(counts, batch_size=batch_size, seed=seed)
    total = sum(counts.values())
    for number in range(2):
        seen: Counter[tuple[str, int]] = Counter()
        for step in range(number * total, (number + 1) * total):
            slots = order.batch(step)
            seen.update((slots.bucket, order.item(slots.bucket, slots.first + i)) for i in range(batch_size))
        assert seen == {(bucket, i): batch_size for bucket, count in counts.items() for i in range(count)}


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    counts = {"a": 5, "b": 3}

    def drawn(seed: int, steps: list[int]) -> list[Any]:
        order = Order(counts, batch_size=4, seed=seed)
        found = [order.batch(step) for step in steps]
        return [(s.bucket, [order.item(s.bucket, s.first + i) for i in range(4)]) for s in found]

    forwards = drawn(1, list(range(20)))
    assert drawn(1, list(range(19, -1, -1)))[::-1] == forwards
    assert drawn(1, [17]) == [forwards[17]]
    assert drawn(2, list(range(20))) != forwards


# -------------------------------------------------------------------------------------------------------------- cache


def test_cache_hits_misses_and_damage(tmp_path: Path) -> None:
    cache, made = TensorCache(tmp_path), []

    def make() -> dict[str, torch.Tensor]:
        made.append(1)
        return {"x": torch.arange(6, dtype=torch.float32).view(2, 3), "h": torch.ones(2, dtype=torch.bfloat16)}

    first = cache.get({"a": 1}, make)
    again = cache.get({"a": 1}, make)
    assert torch.equal(first["x"], again["x"])
    assert again["h"].dtype == torch.bfloat16
    cache.get({"a": 2}, make)
    assert (len(made), cache.num_hits, cache.num_misses, cache.num_damaged) == (2, 1, 2, 0)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 2
    assert cache.num_bytes == sum(p.stat().st_size for p in files)
    assert TensorCache(tmp_path).num_bytes == cache.num_bytes
    assert not list(tmp_path.rglob("*.partial"))

    for damage in (lambda data: data[:-3], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: b""):
        for path in files:
            path.write_bytes(damage(path.read_bytes()))
        assert torch.equal(cache.get({"a": 1}, make)["x"], first["x"])
        cache.get({"a": 2}, make)
    assert cache.num_damaged == 6
    assert len(made) == 8


def test_a_fingerprint_follows_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    one = folder_fingerprint({"vae": tmp_path / "vae"})
    assert folder_fingerprint({"vae": tmp_path / "vae"}) == one
    (tmp_path / "vae" / "config.json").write_text('{"a": 1}')
    assert folder_fingerprint({"vae": tmp_path / "vae"}) != one


# -------------------------------------------------------------------------------------------------------- prefetching


def test_batches_come_in_order_and_only_so_many_ahead() -> None:
    made, gate = [], threading.Event()

    def make(step: int) -> int:
        gate.wait(10)
        made.append(step)
        return step * step

    with Prefetcher(make, first=3, last=6, ahead=2) as batches:
        assert made == []
        gate.set()
        assert [batches.get() for _ in range(3)] == [9, 16, 25]
    assert made == [3, 4, 5]
    with Prefetcher(make, first=0, last=9, ahead=0) as batches:
        assert [batches.get(), batches.get()] == [0, 1]
    assert made[3:] == [0, 1]


def test_what_a_batch_raises_is_raised_where_it_is_asked_for_and_nothing_is_left() -> None:
    def make(step: int) -> int:
        if step == 1:
            raise DataError("b.png: is bad")
        return step

    with Prefetcher(make, first=0, last=9, ahead=4) as batches:
        assert batches.get() == 0
        with pytest.raises(DataError, match=r"b\.png"):
            batches.get()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("verst-prefetch")]


# ------------------------------------------------------------------------------------------------------------ dataset


@pytest.fixture(scope="module")
def sd3() -> Components:
    folder = tiny_folder("sd3")
    return recognise(folder).load(folder, parts=ALL_PARTS, dtype=torch.float32, device=torch.device("cpu"))


def dataset(
    config: Any, components: Components, root: Path, *, batch_size: int = 2, cache: Path | None = None, frames: int = 1
) -> FileDataset:
    caches = {} if cache is None else {kind: TensorCache(cache / kind) for kind in ("latents", "text")}
    encoder = Encoder(
        components,
        max_sequence_length=8,
        latents=caches.get("latents"),
        text=caches.get("text"),
        first_frame_as_condition=config.first_frame_as_condition,
    )
    return FileDataset(
        config, components, BadFiles(root / "bad_files.jsonl", config.on_bad_file), size=(32, 32), num_frames=frames,
        fps=None, batch_size=batch_size, seed=0, encoder=encoder, caches=list(caches.values()),
    )  # fmt: skip


def pictures(root: Path, sizes: dict[str, tuple[int, int]]) -> Path:
    for index, (name, (height, width)) in enumerate(sizes.items()):
        write_picture(root / f"{name}.png", height=height, width=width, seed=index)
        (root / f"{name}.txt").write_text(name)
    return root


def test_batches_never_mix_buckets_and_small_ones_are_counted(sd3: Components, tmp_path: Path) -> None:
    root = pictures(tmp_path / "set", {"a": (40, 40), "b": (32, 64), "c": (40, 90), "d": (64, 64), "tiny": (20, 20)})
    config = FolderData.model_validate(
        {"path": root, "heldout": 0, "buckets": {"sizes": [(32, 32), (32, 64)], "max_upscale": 1.0}}
    )
    data = dataset(config, sd3, tmp_path, batch_size=3)
    assert (data.num_items, data.num_dropped) == (4, 1)
    seen = set()
    for step in range(8):
        batch = data.batch(step)
        width = batch.bucket.width
        assert batch.x0[0]["visual"].shape[0] == 3
        assert batch.x0[0]["visual"].shape[-1] * 2 == width // 2 * batch.x0[0]["visual"].shape[-2] * 2 // 16
        assert {item.caption for item in batch.items} <= ({"a", "d"} if width == 32 else {"b", "c"})
        seen |= {item.caption for item in batch.items}
    assert seen == {"a", "b", "c", "d"}


def test_sizes_that_the_model_cannot_make_are_refused(sd3: Components, tmp_path: Path) -> None:
    root = pictures(tmp_path / "set", {"a": (40, 40)})
    config = FolderData.model_validate({"path": root, "buckets": {"sizes": [(33, 32)]}})
    with pytest.raises(ConfigError, match=r"data\.buckets: 33x32, 1 frames: .*nearest"):
        dataset(config, sd3, tmp_path)


def test_caches_give_the_same_bits_and_notice_changes(sd3: Components, tmp_path: Path) -> None:
    root = pictures(tmp_path / "set", {"a": (40, 40), "b": (50, 60)})
    config = FolderData(path=root)
    plain = dataset(config, sd3, tmp_path).batch(0)
    cold, warm = (dataset(config, sd3, tmp_path, cache=tmp_path / "cache") for _ in range(2))
    for data in (cold, warm):
        batch = data.batch(0)
        assert torch.equal(batch.x0[0]["visual"], plain.x0[0]["visual"])
        rows, wanted = (
            d.condition(batch, ["", batch.items[1].caption]) for d in (data, dataset(config, sd3, tmp_path))
        )
        assert rows.keys() == wanted.keys()
        assert all(torch.equal(rows[name], wanted[name]) for name in rows)
    assert [cache.num_misses for cache in cold.caches] == [2, 2]
    assert [(cache.num_hits, cache.num_misses) for cache in warm.caches] == [(2, 0), (2, 0)]
    write_picture(root / "a.png", seed=99)  # the same name, another picture
    changed = dataset(config, sd3, tmp_path, cache=tmp_path / "cache")
    assert not torch.equal(changed.batch(0).x0[0]["visual"], plain.x0[0]["visual"])
    assert [(cache.num_hits, cache.num_misses) for cache in changed.caches] == [(1, 1), (0, 0)]


def test_the_fingerprint_is_of_the_encoders(sd3: Components, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(sd3.folder, tmp_path / "model")
    load = lambda: recognise(tmp_path / "model").load(  # noqa: E731
        tmp_path / "model", parts=ALL_PARTS, dtype=torch.float32, device=torch.device("cpu")
    )
    one = encoder_fingerprint(load())
    assert one == encoder_fingerprint(sd3)
    for name in ("transformer", "scheduler"):
        for path in (tmp_path / "model" / name).glob("*.json"):
            path.write_text(path.read_text() + "\n")
    assert encoder_fingerprint(load()) == one
    weights = next((tmp_path / "model" / "vae").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert encoder_fingerprint(load()) != one
    root = pictures(tmp_path / "set", {"a": (40, 40), "b": (50, 60)})
    for components, misses in ((sd3, [2, 2]), (sd3, [0, 0]), (load(), [2, 2])):
        data = dataset(FolderData(path=root), components, tmp_path, cache=tmp_path / "cache")
        batch = data.batch(0)
        data.condition(batch, ["", batch.items[1].caption])
        assert [cache.num_misses for cache in data.caches] == misses


def test_skipped_files_are_replaced_by_the_next_in_order(sd3: Components, tmp_path: Path) -> None:
    names = [f"p{i}" for i in range(6)]
    root = pictures(tmp_path / "set", dict.fromkeys(names, (64, 64)))
    clean = dataset(FolderData(path=root), sd3, tmp_path, batch_size=3)
    before = [[item.caption for item in clean.batch(step).items] for step in range(6)]
    whole = (root / "p2.png").read_bytes()
    (root / "p2.png").write_bytes(whole[: len(whole) // 2])  # its header is good, so that it has a place in the order
    data = dataset(FolderData(path=root, on_bad_file="skip"), sd3, tmp_path, batch_size=3)
    replaced = 0
    for step in range(6):
        batch = data.batch(step)
        captions = [item.caption for item in batch.items]
        assert len(captions) == 3
        assert "p2" not in captions
        assert batch.num_replaced == before[step].count("p2")
        assert [a for a, b in zip(captions, before[step], strict=True) if b != "p2"] == [
            b for b in before[step] if b != "p2"
        ]
        replaced += batch.num_replaced
        again = dataset(FolderData(path=root, on_bad_file="skip"), sd3, tmp_path, batch_size=3).batch(step)
        assert [item.caption for item in again.items] == captions
    assert replaced == 3
    (row,) = [json.loads(line) for line in (tmp_path / "bad_files.jsonl").read_text().splitlines()]
    assert row["file"] == "p2.png"
    assert "truncated" in row["reason"]
    stopping = dataset(FolderData(path=root), sd3, tmp_path, batch_size=6)
    with pytest.raises(DataError, match=r"p2\.png: cannot be read as a picture.*on_bad_file"):
        stopping.batch(0)
    for name in names:
        (root / f"{name}.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="none of 6 items of bucket 32x32x1 could be used"):
        dataset(FolderData(path=root, on_bad_file="skip"), sd3, tmp_path).batch(0)


def test_broken_clips_and_sounds_are_skipped_by_name(tmp_path: Path) -> None:
    """Of one batch of two whole clips: a file that is none, one cut off, one mute, one with a NaN in its sound."""
    root = tmp_path / "set"
    names = ["good1.mp4", "good2.mp4", "cut.mkv", "mute.mp4", "nan.mp4"]
    for name in names:
        noise = name == "cut.mkv"
        write_clip(root / name, frames=12, sound_s=None if name == "mute.mp4" else 0.75, noise=noise)
    (root / "text.mp4").write_text("this is no clip")
    whole = (root / "cut.mkv").read_bytes()
    (root / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    write_float_sound(root / "nan.wav", np.array([0.1, np.nan] * 8000))
    write_sound(root / "sound.wav", seconds=1.0)
    rows = [{"media": n, "caption": n, "audio": f"{'nan' if n.startswith('nan') else 'sound'}.wav"} for n in names]
    rows += [
        {"media": "text.mp4", "caption": "x", "audio": "sound.wav"},
        {"media": "good1.mp4", "caption": "x", "audio": "no.wav"},
    ]
    rows[3]["audio"] = "mute.mp4"
    (root / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    components = tiny_worker("ltx2").components
    config = ManifestData(path=root / "set.jsonl", audio="audio", on_bad_file="skip")
    data = dataset(config, components, tmp_path, frames=9)
    captions = {item.caption for step in range(7) for item in data.batch(step).items}
    assert captions == {"good1.mp4", "good2.mp4"}
    found = [json.loads(line) for line in (tmp_path / "bad_files.jsonl").read_text().splitlines()]
    reason = {row["file"]: row["reason"] for row in found}
    named = sorted(text.split("(")[1] for text in reason)
    assert [text.split(",")[0] for text in named] == ["cut.mkv", "good1.mp4", "mute.mp4", "nan.mp4", "text.mp4"]
    assert "no.wav" in named[1]
    assert any("cannot be read as a clip" in text for text in reason.values())
    assert any("NaN" in text for text in reason.values())
    assert any("has no sound" in text for text in reason.values())


def test_bad_files_of_later_steps_are_forgotten_on_resume(tmp_path: Path) -> None:
    bad = BadFiles(tmp_path / "bad_files.jsonl", "skip")
    for name, step in (("a", -1), ("b", 3), ("c", 7), ("b", 9)):
        bad.add(name, "why", step=step)
    assert len(bad) == 3
    again = BadFiles(tmp_path / "bad_files.jsonl", "skip")
    again.resume_at(5)
    assert len(again) == 2
    again.add("c", "why", step=7)
    rows = [json.loads(line) for line in (tmp_path / "bad_files.jsonl").read_text().splitlines()]
    assert [(row["file"], row["step"]) for row in rows] == [("a", -1), ("b", 3), ("c", 7)]


def test_heldout_items_are_never_trained_on_and_do_not_depend_on_the_others(sd3: Components, tmp_path: Path) -> None:
    root = pictures(tmp_path / "set", {f"p{i}": (40, 40) for i in range(8)})
    data = dataset(FolderData(path=root, heldout=3), sd3, tmp_path)
    held = {item.caption for batch in data.heldout(2) for item in batch.items}
    trained = {item.caption for step in range(10) for item in data.batch(step).items}
    assert len(held) == 3
    assert not held & trained
    assert held | trained == {f"p{i}" for i in range(8)}
    other = dataset(FolderData(path=root, heldout=2), sd3, tmp_path)
    assert {item.caption for batch in other.heldout(2) for item in batch.items} < held
    with pytest.raises(DataError, match=r"of 8 items none is left to train on.*8 held out"):
        dataset(FolderData(path=root, heldout=8), sd3, tmp_path)


def test_condition_images(tmp_path: Path, sd3: Components) -> None:
    (tmp_path / "set").mkdir()
    clip = write_clip(tmp_path / "set" / "a.mp4", frames=9)
    (tmp_path / "set" / "a.txt").write_text("a clip")
    table = tmp_path / "set" / "table.jsonl"
    table.write_text(json.dumps({"media": "a.mp4", "caption": "a clip", "first": str(tiny_image(0))}))
    folder = tiny_folder("wan2.2-i2v-a14b")
    wan = recognise(folder).load(folder, parts=ALL_PARTS, dtype=torch.float32, device=torch.device("cpu"))
    assert clip.exists()
    with pytest.raises(ConfigError, match=r"wan_i2v needs 1 condition image an item: name a column with data\.image"):
        dataset(FolderData(path=tmp_path / "set"), wan, tmp_path, frames=5)
    with pytest.raises(ConfigError, match=r"takes no condition image; remove data\.image"):
        dataset(FolderData(path=tmp_path / "set", first_frame_as_condition=True), sd3, tmp_path)
    given = dataset(ManifestData(path=table, image="first"), wan, tmp_path, frames=5, batch_size=1)
    own = dataset(
        FolderData(path=tmp_path / "set", first_frame_as_condition=True), wan, tmp_path, frames=5, batch_size=1
    )
    rows = [data.condition(data.batch(0), ["a clip"])["condition"] for data in (given, own)]
    assert rows[0].shape == rows[1].shape
    assert not torch.equal(rows[0], rows[1])
