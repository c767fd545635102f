"""Sources of items: every layout, and every kind of bad file by its name and reason."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_fixtures import write_clip, write_float_sound, write_picture, write_sound
from PIL import Image

from verst.config.data import FolderData, ManifestData, PreferenceData, WebDatasetData
from verst.data.bad_files import BadFiles
from verst.data.buckets import Bucket, fit, nearest_bucket
from verst.data.items import FileRef
from verst.data.media import Probe, load_clip, load_picture, load_sound, probe, window_of
from verst.data.shards import expand
from verst.data.sources import read_items
from verst.errors import DataError


def skipping(folder: Path) -> BadFiles:
    return BadFiles(folder / "bad_files.jsonl", "skip")


def reasons(folder: Path) -> dict[str, str]:
    path = folder / "bad_files.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["file"]: row["reason"] for row in rows}


def ref(path: Path) -> FileRef:
    return FileRef(path=path, name=path.name)


# ------------------------------------------------------------------------------------------------------------- folder


def test_folder_with_a_text_beside_each_file(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write_picture(root / "b.png")
    write_picture(root / "sub" / "a.jpg")
    write_clip(root / "c.mp4")
    write_sound(root / "c.wav", seconds=1)
    for name in ("b", "sub/a", "c"):
        (root / f"{name}.txt").write_text(f" caption of {name}\n")
    write_picture(root / "missing.png")
    write_picture(root / "empty.png")
    (root / "empty.txt").write_text(" \n")
    write_picture(root / "latin.png")
    (root / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    write_sound(root / "lone.wav", seconds=1)
    items = read_items(FolderData(path=root), skipping(tmp_path))
    assert [(item.key, item.caption) for item in items] == [
        ("b.png", "caption of b"),
        ("c.mp4", "caption of c"),
        ("sub/a.jpg", "caption of sub/a"),
    ]
    assert items[1].audio is not None
    assert items[1].audio.name == "c.wav"
    found = reasons(tmp_path)
    assert found["missing.png"] == "has no caption: there is no missing.txt beside it"
    assert "empty caption: empty.txt" in found["empty.png"]
    assert "not UTF-8: latin.txt" in found["latin.png"]
    assert "sound without a clip" in found["lone.wav"]
    assert len(found) == 4


@pytest.mark.parametrize(
    ("name", "column"), [("metadata.jsonl", "text"), ("captions.jsonl", "caption"), ("metadata.csv", "prompt")]
)
def test_folder_with_metadata_as_image_folder_has_it(tmp_path: Path, name: str, column: str) -> None:
    root = tmp_path / "set"
    for index, stem in enumerate(("a", "b", "unlisted")):
        write_picture(root / f"{stem}.png", seed=index)
    rows = [
        {"file_name": "a.png", column: "one"},
        {"file_name": "b.png", column: "two"},
        {"file_name": "gone.png", column: "3"},
    ]
    if name.endswith("csv"):
        with (root / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["file_name", column])
            writer.writeheader()
            writer.writerows(rows)
    else:
        (root / name).write_text("\n".join(json.dumps(row) for row in rows))
    items = read_items(FolderData(path=root), skipping(tmp_path))
    assert [(item.key, item.caption) for item in items] == [("a.png", "one"), ("b.png", "two")]
    assert set(reasons(tmp_path)) == {"unlisted.png", "gone.png"}


def test_stop_names_the_first_bad_file_and_the_way_on(tmp_path: Path) -> None:
    write_picture(tmp_path / "set" / "a.png")
    with pytest.raises(DataError, match=r'a\.png: has no caption.*data\.on_bad_file = "skip"'):
        read_items(FolderData(path=tmp_path / "set"), BadFiles(tmp_path / "bad_files.jsonl", "stop"))
    with pytest.raises(DataError, match=r"no usable item was found; 1 bad files"):
        read_items(FolderData(path=tmp_path / "set"), skipping(tmp_path))


# ----------------------------------------------------------------------------------------------------------- manifest


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_manifest_of_each_format(tmp_path: Path, suffix: str) -> None:
    rows = [{"file": f"m/{i}.png", "text": f"number {i}", "first": f"c/{i}.png"} for i in range(3)]
    table = write_table(tmp_path / f"set{suffix}", rows)
    config = ManifestData(path=table, media="file", caption="text", image="first")
    items = read_items(config, skipping(tmp_path))
    assert [item.caption for item in items] == ["number 0", "number 1", "number 2"]
    assert items[2].media[0].path == tmp_path / "m" / "2.png"
    assert items[2].image is not None
    assert items[2].image.path == tmp_path / "c" / "2.png"


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_wrong_column_is_answered_with_the_nearest(tmp_path: Path, suffix: str) -> None:
    table = write_table(tmp_path / f"set{suffix}", [{"media": "a.png", "captions": "x"}])
    with pytest.raises(DataError, match=r"no column 'caption' \(data\.caption\); did you mean 'captions'"):
        read_items(ManifestData(path=table), skipping(tmp_path))


def test_bad_lines_of_tables(tmp_path: Path) -> None:
    lines = [b'{"media": "a.png", "caption": "good"}', b'{"media": "b.png"', b'{"media": "c.png", "caption": ""}',
             b'{"media": "d.png"}', b'{"media": 5, "caption": "x"}', b'["e"]', b'{"media": "f.png", "caption": "\xff"}']  # fmt: skip
    (tmp_path / "set.jsonl").write_bytes(b"\n".join(lines))
    items = read_items(ManifestData(path=tmp_path / "set.jsonl"), skipping(tmp_path))
    assert [item.caption for item in items] == ["good"]
    found = reasons(tmp_path)
    assert "is not JSON" in found["set.jsonl line 2"]
    assert found["set.jsonl line 3"] == found["set.jsonl line 4"] == "caption is empty"
    assert found["set.jsonl line 5"] == "media is a int, not text"
    assert "is a list" in found["set.jsonl line 6"]
    assert "not UTF-8" in found["set.jsonl line 7"]


def test_a_ragged_csv_and_one_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "set.csv").write_text('media,caption\na.png,"one, two"\nb.png\nc.png,x,y\nd.png,last\n')
    items = read_items(ManifestData(path=tmp_path / "set.csv"), skipping(tmp_path))
    assert [item.caption for item in items] == ["one, two", "last"]
    found = reasons(tmp_path)
    assert found == {"set.csv line 3": "has 1 cells under 2 columns", "set.csv line 4": "has 3 cells under 2 columns"}
    (tmp_path / "latin.csv").write_bytes("media,caption\na.png,ok\nb.png,caf\xe9\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.csv line 3 is not UTF-8"):
        read_items(ManifestData(path=tmp_path / "latin.csv"), skipping(tmp_path))


def test_a_csv_whose_quotes_do_not_close(tmp_path: Path) -> None:
    (tmp_path / "set.csv").write_text('media,caption\na.png,one\nb.png,"two\nc.png,three\n')
    with pytest.raises(DataError, match=r"set\.csv: the row that begins in line 3 is no CSV"):
        read_items(ManifestData(path=tmp_path / "set.csv"), skipping(tmp_path))
    (tmp_path / "set.csv").write_text('media,caption\na.png,"one\nand more"\nb.png,' + "x" * 200_000)
    with pytest.raises(DataError, match=r"begins in line 4 is no CSV: field larger"):
        read_items(ManifestData(path=tmp_path / "set.csv"), skipping(tmp_path))


def test_parquet_of_a_wrong_type_or_no_parquet(tmp_path: Path) -> None:
    table = write_table(
        tmp_path / "set.parquet", [{"media": "a.png", "caption": 7}, {"media": "b.png", "caption": None}]
    )
    with pytest.raises(DataError, match="no usable item"):
        read_items(ManifestData(path=table), skipping(tmp_path))
    assert reasons(tmp_path) == {
        "set.parquet row 0": "caption is a int, not text",
        "set.parquet row 1": "caption is empty",
    }
    (tmp_path / "text.parquet").write_text("media,caption\n")
    with pytest.raises(DataError, match=r"text\.parquet is no parquet table"):
        read_items(ManifestData(path=tmp_path / "text.parquet"), skipping(tmp_path))
    with pytest.raises(DataError, match=r"a table is a \.jsonl, \.csv or \.parquet file"):
        read_items(ManifestData(path=tmp_path / "set.xlsx"), skipping(tmp_path))


def test_preferences(tmp_path: Path) -> None:
    table = write_table(tmp_path / "p.jsonl", [{"prompt": "12", "chosen": "a.png", "rejected": "b.png"}])
    (item,) = read_items(PreferenceData(path=table), skipping(tmp_path))
    assert [ref.name for ref in item.media] == ["a.png", "b.png"]
    assert item.caption == "12"


# --------------------------------------------------------------------------------------------------------- webdataset


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def test_shards(tmp_path: Path) -> None:
    png = write_picture(tmp_path / "x.png").read_bytes()
    for shard in range(2):
        with tarfile.open(tmp_path / f"s-{shard:03d}.tar", "w") as tar:
            add(tar, "d/1.png", png)
            add(tar, "d/1.txt", f"one of {shard}".encode())
            add(tar, "2.png", png)
            add(tar, "2.json", json.dumps({"caption": "two"}).encode())
            add(tar, "3.png", png)
            add(tar, "4.txt", b"no picture")
            add(tar, "2.png", png)
    items = read_items(WebDatasetData(shards=str(tmp_path / "s-{000..001}.tar")), skipping(tmp_path))
    assert [(item.key, item.caption) for item in items] == [
        ("s-000.tar:2", "two"), ("s-000.tar:d/1", "one of 0"), ("s-001.tar:2", "two"), ("s-001.tar:d/1", "one of 1"),
    ]  # fmt: skip
    assert items[0].media[0].read() == png
    assert probe(items[0].media[0]) == Probe(height=40, width=40)
    found = reasons(tmp_path)
    assert found["s-000.tar:3"] == "has no caption: neither .txt nor .json"
    assert "has 0 (members: txt)" in found["s-000.tar:4"]
    assert "a second time" in found["s-001.tar:2.png"]
    assert len(found) == 6


def test_a_truncated_shard_gives_what_is_whole(tmp_path: Path) -> None:
    png = write_picture(tmp_path / "x.png").read_bytes()
    whole = tmp_path / "s.tar"
    with tarfile.open(whole, "w") as tar:
        for key in ("1", "2"):
            add(tar, f"{key}.txt", key.encode())
            add(tar, f"{key}.png", png)
    data = whole.read_bytes()
    whole.write_bytes(data[: data.rindex(png) + 100])
    (item,) = read_items(WebDatasetData(shards=str(whole)), skipping(tmp_path))
    assert item.caption == "1"
    assert reasons(tmp_path)["s.tar:2.png"] == "is cut off: s.tar is truncated"
    whole.write_bytes(b"no tar at all" * 100)
    with pytest.raises(DataError, match="no usable item"):
        read_items(WebDatasetData(shards=str(whole)), skipping(tmp_path))
    assert "is no whole tar file" in reasons(tmp_path)["s.tar"]


@pytest.mark.parametrize(("damage", "reason"), [("header", "is damaged at byte"), ("end", "may be cut off")])
def test_a_shard_that_ends_too_early_is_named(tmp_path: Path, damage: str, reason: str) -> None:
    """tarfile itself says nothing in either case, and gives the members before."""
    png = write_picture(tmp_path / "x.png").read_bytes()
    shard = tmp_path / "s.tar"
    with tarfile.open(shard, "w") as tar:
        for key in ("1", "2"):
            add(tar, f"{key}.txt", key.encode())
            add(tar, f"{key}.png", png)
    with tarfile.open(shard) as tar:
        second = tar.getmember("2.txt").offset
    data = bytearray(shard.read_bytes())
    data[second : second + 5] = b"xxxxx"
    shard.write_bytes(bytes(data) if damage == "header" else bytes(data[:second]))
    (item,) = read_items(WebDatasetData(shards=str(shard)), skipping(tmp_path))
    assert item.caption == "1"
    assert reason in reasons(tmp_path)["s.tar"]
    with pytest.raises(DataError, match=reason):
        read_items(WebDatasetData(shards=str(shard)), BadFiles(tmp_path / "stop.jsonl", "stop"))


def test_patterns_of_shards(tmp_path: Path) -> None:
    for name in ("a-00.tar", "a-01.tar", "b.tar"):
        (tmp_path / name).touch()
    names = [path.name for path in expand(str(tmp_path / "{a-*,b}.tar"))]
    assert names == ["a-00.tar", "a-01.tar", "b.tar"]
    with pytest.raises(DataError, match=r"there is no file .*a-02\.tar"):
        expand(str(tmp_path / "a-{00..02}.tar"))


# -------------------------------------------------------------------------------------------------------------- files


def test_pictures_upright_and_on_white(tmp_path: Path) -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[0, 0] = 255
    exif = Image.Exif()
    exif[274] = 6  # the camera was held on its side
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    assert probe(ref(tmp_path / "turned.png")) == Probe(height=6, width=4)
    turned = load_picture(ref(tmp_path / "turned.png"))
    assert turned.shape == (1, 6, 4, 3)
    assert turned[0, 0, 3].tolist() == [255, 255, 255]
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert load_picture(ref(tmp_path / "clear.png")).unique().tolist() == [255]
    Image.fromarray(np.full((2, 2), 257 * 100, np.uint16)).save(tmp_path / "deep.png")
    assert load_picture(ref(tmp_path / "deep.png")).unique().tolist() == [100]


def test_bad_pictures_and_clips(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("this is no picture")
    (tmp_path / "text.mp4").write_text("this is no clip")
    for name in ("empty.png", "text.png"):
        with pytest.raises(DataError, match="cannot be read as a picture"):
            probe(ref(tmp_path / name))
    with pytest.raises(DataError, match="cannot be read as a clip"):
        probe(ref(tmp_path / "text.mp4"))
    with pytest.raises(DataError, match="No such file"):
        probe(ref(tmp_path / "gone.png"))
    with pytest.raises(DataError, match=r"no picture or clip: \.doc"):
        probe(ref(tmp_path / "a.doc"))
    whole = write_picture(tmp_path / "cut.jpg", height=200, width=200).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    assert probe(ref(tmp_path / "cut.jpg")).height == 200  # the header is whole
    with pytest.raises(DataError, match=r"cannot be read as a picture: .*truncated"):
        load_picture(ref(tmp_path / "cut.jpg"))
    write_sound(tmp_path / "sound.wav", seconds=0.1).rename(tmp_path / "sound.mp4")
    with pytest.raises(DataError, match="no pictures: it is a container without a video stream"):
        probe(ref(tmp_path / "sound.mp4"))
    write_clip(tmp_path / "none.mp4", frames=0, sound_s=0.2)
    with pytest.raises(DataError, match=r"no frames|no pictures|cannot be read|frames a second"):
        probe(ref(tmp_path / "none.mp4"))


def test_a_clip_that_breaks_off_and_a_sound_that_is_none(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "cut.mkv", frames=48, height=128, width=128, noise=True)
    found = probe(ref(clip))
    assert found.num_frames == 48
    data = clip.read_bytes()
    clip.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"header says 48 frames, and frame \d+ cannot be decoded|read as a clip"):
        load_clip(ref(clip), window_of(found, num_frames=47, fps=24.0))
    (tmp_path / "text.wav").write_text("this is no sound" * 100)
    with pytest.raises(DataError, match="cannot be read as a clip"):
        load_sound(ref(tmp_path / "text.wav"), start_s=0.0, seconds=0.1, sample_rate=16000, channels=1)


def test_a_window_in_the_middle_of_a_clip_at_another_rate(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", frames=13, fps=24)
    found = probe(ref(path))
    assert found == Probe(height=32, width=32, num_frames=13, fps=24.0)
    window = window_of(found, num_frames=5, fps=24.0)
    assert window.start_s == pytest.approx(4 / 24)
    levels = load_clip(ref(path), window).float().mean(dim=(1, 2, 3))
    torch.testing.assert_close(levels, 15.0 * torch.arange(4, 9), atol=3, rtol=0)
    half = load_clip(ref(path), window_of(found, num_frames=5, fps=12.0)).float().mean(dim=(1, 2, 3))
    torch.testing.assert_close(half, 15.0 * torch.tensor([1.0, 3, 5, 7, 9]), atol=3, rtol=0)


def test_sound_and_its_faults(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.wav", seconds=0.5, rate=8000)
    sound = load_sound(ref(path), start_s=0.1, seconds=0.25, sample_rate=16000, channels=2)
    assert sound.shape == (2, 4000)
    assert torch.equal(sound[0], sound[1])
    assert float(sound.abs().max()) == pytest.approx(8000 / 32768, abs=0.02)
    with pytest.raises(DataError, match=r"sound is 0\.50 s long, and its pictures need 0\.80 s"):
        load_sound(ref(path), start_s=0.0, seconds=0.8, sample_rate=16000, channels=1)
    short = load_sound(ref(path), start_s=0.0, seconds=0.55, sample_rate=8000, channels=1)
    assert float(short[:, 4010:].abs().max()) == 0  # silence where a codec cut the end
    broken = write_float_sound(tmp_path / "nan.wav", np.array([0.1] * 100 + [np.nan] + [0.1] * 100))
    with pytest.raises(DataError, match="NaN or infinite"):
        load_sound(ref(broken), start_s=0.0, seconds=0.01, sample_rate=16000, channels=1)
    mute = write_clip(tmp_path / "mute.mp4")
    with pytest.raises(DataError, match="has no sound"):
        load_sound(ref(mute), start_s=0.0, seconds=0.1, sample_rate=16000, channels=1)


# ------------------------------------------------------------------------------------------------------------ buckets


def test_nearest_bucket() -> None:
    buckets = [
        Bucket(height=64, width=64),
        Bucket(height=48, width=96),
        Bucket(height=96, width=48),
        Bucket(height=128, width=128),
    ]
    place = {size: str(nearest_bucket(Probe(height=size[0], width=size[1]), buckets, max_upscale=1.0)) for size in (
        (64, 64), (100, 110), (60, 200), (400, 100), (500, 500))}  # fmt: skip
    assert place == {
        (64, 64): "64x64x1", (100, 110): "64x64x1", (60, 200): "48x96x1", (400, 100): "96x48x1", (500, 500): "128x128x1",
    }  # fmt: skip
    with pytest.raises(
        DataError, match=r"too small: 40x40 must be enlarged 1\.60 times, data\.buckets\.max_upscale = 1"
    ):
        nearest_bucket(Probe(height=40, width=40), buckets, max_upscale=1.0)
    assert nearest_bucket(Probe(height=40, width=40), buckets, max_upscale=2.0) == buckets[0]
    clips = [Bucket(height=64, width=64, num_frames=n, fps=12.0) for n in (5, 9)]
    long = Probe(height=64, width=64, num_frames=20, fps=24.0)
    assert nearest_bucket(long, clips, max_upscale=1.0).num_frames == 9
    with pytest.raises(DataError, match=r"too short: 4 frames, the shortest bucket has 5"):
        nearest_bucket(Probe(height=64, width=64, num_frames=9, fps=24.0), clips, max_upscale=1.0)


def test_fit_covers_and_takes_the_middle() -> None:
    frames = torch.zeros(2, 20, 40, 3, dtype=torch.uint8)
    frames[:, :, 10:30] = 200
    assert fit(frames, height=10, width=10).float().min() > 180  # the middle square
    assert fit(frames, height=20, width=40) is frames
    assert fit(frames, height=7, width=33).shape == (2, 7, 33, 3)
