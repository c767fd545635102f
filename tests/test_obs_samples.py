"""Samples that a run keeps for people, read back by other means, and what it keeps of its groups."""

import json
import math
from pathlib import Path

import av
import numpy as np
import pytest

from verst.obs.events import EventLog
from verst.obs.groups import add_group
from verst.obs.images import load_picture
from verst.obs.samples import ShownSample, forget_after, read_samples, save_samples, saved_steps


def sample(*, frames: int = 1, value: int = 0, size: tuple[int, int] = (16, 24), **known) -> ShownSample:
    media = np.full((frames, *size, 3), value, dtype=np.uint8)
    return ShownSample(media=media, prompt="a 7", seed=2**40, reward=0.5, **known)


def test_a_picture_comes_back_with_what_is_known_of_it(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (1, 16, 24, 3), dtype=np.uint8)
    shown = ShownSample(
        media=picture,
        prompt="a 7",
        seed=2**40,
        reward=math.nan,
        rewards={"ocr": 0.25, "clip": math.nan},
        place={"rank": "best", "group": 3, "index": 1},
    )
    folder = save_samples(tmp_path, "rollout", 5, [shown], keep=10)
    assert folder == tmp_path / "rollout" / "step_00000005"
    (row,) = read_samples(folder)
    assert np.array_equal(load_picture(folder / row.pop("picture")), picture[0])
    assert row == {
        "width": 24,
        "height": 16,
        "prompt": "a 7",
        "seed": 2**40,
        "reward": None,
        "rewards": {"ocr": 0.25, "clip": None},
        "rank": "best",
        "group": 3,
        "index": 1,
    }


def test_a_large_picture_is_small_on_disk_and_looks_the_same(tmp_path):
    y, x = np.mgrid[0:512, 0:512]
    media = np.stack([x // 2, y // 2, (x + y) // 4], axis=-1).astype(np.uint8)[None]
    folder = save_samples(tmp_path, "heldout", 0, [ShownSample(media=media, prompt="", seed=0, reward=1)], keep=10)
    (row,) = read_samples(folder)
    path = folder / row["picture"]
    assert path.suffix == ".webp"
    assert path.stat().st_size < media.nbytes / 20
    assert np.abs(load_picture(path).astype(int) - media[0]).mean() < 3


def test_a_clip_with_sound_plays(tmp_path):
    frames = np.stack([np.full((32, 48, 3), value, dtype=np.uint8) for value in (40, 90, 140, 190, 240)])
    wave = np.sin(np.arange(16_000) / 16_000 * 2 * math.pi * 440).astype(np.float32)[None]
    shown = ShownSample(
        media=frames, prompt="rain", seed=1, reward=1.0, fps=5.0, audio=np.repeat(wave, 2, 0), sample_rate=16_000
    )
    folder = save_samples(tmp_path, "heldout", 1, [shown], keep=10)
    (row,) = read_samples(folder)
    assert (row["frames"], row["fps"], row["sound"]) == (5, 5.0, True)
    with av.open(str(folder / row["clip"])) as container:
        levels = [float(frame.to_ndarray(format="gray").mean()) for frame in container.decode(video=0)]
    assert len(levels) == 5
    assert levels == pytest.approx([40, 90, 140, 190, 240], abs=12)
    with av.open(str(folder / row["clip"])) as container:
        sound = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=-1)
    assert sound.shape[-1] == pytest.approx(48_000, rel=0.03)
    assert np.sqrt((sound.astype(np.float64) ** 2).mean()) == pytest.approx(math.sqrt(0.5), abs=0.05)
    assert np.array_equal(load_picture(folder / row["picture"])[0, 0], [40, 40, 40])


def test_what_is_kept_is_bounded_and_covers_the_run(tmp_path):
    for iteration in range(40):
        save_samples(tmp_path, "heldout", iteration, [sample()], keep=8)
        steps = [int(path.name[5:]) for path in saved_steps(tmp_path, "heldout")]
        assert len(steps) <= 8
        assert (steps[0], steps[-1]) == (0, iteration)
    gaps = np.diff(steps)
    assert gaps.max() <= 2 * 39 / 7 + 1
    assert sorted(path.name for path in (tmp_path / "heldout").iterdir()) == [f"step_{step:08d}" for step in steps]


def test_an_iteration_that_is_made_again_takes_the_place_of_the_first(tmp_path):
    save_samples(tmp_path, "heldout", 4, [sample(value=1), sample(value=2)], keep=8)
    save_samples(tmp_path, "heldout", 6, [sample()], keep=8)
    (tmp_path / "rollout" / ".step_00000005.partial").mkdir(parents=True)
    forget_after(tmp_path, 4)
    assert [path.name for path in saved_steps(tmp_path, "heldout")] == ["step_00000004"]
    assert list((tmp_path / "rollout").iterdir()) == []
    folder = save_samples(tmp_path, "heldout", 4, [sample(value=9)], keep=8)
    (row,) = read_samples(folder)
    assert load_picture(folder / row["picture"]).max() == 9
    assert sorted(path.name for path in folder.iterdir()) == ["000.png", "samples.json"]


def test_a_group_is_one_event_of_its_finite_rewards(tmp_path: Path):
    log = EventLog(tmp_path / "groups.jsonl")
    add_group(
        log,
        iteration=3,
        group=1,
        prompt="a 7",
        rewards=[1.0, math.nan, 3.0],
        by_reward={"ocr": [0.5, 0.25, 0.75], "clip": [math.nan] * 3},
        dropped_by="zero_variance",
    )
    log.close()
    (row,) = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "groups.jsonl").open()]
    assert row.pop("time_s") > 1e9
    assert row == {
        "name": "group",
        "iteration": 3,
        "group": 1,
        "prompt": "a 7",
        "mean": 2.0,
        "min": 1.0,
        "max": 3.0,
        "std": 1.0,
        "ocr/mean": 0.5,
        "ocr/min": 0.25,
        "ocr/max": 0.75,
        "ocr/std": pytest.approx(math.sqrt(0.125 / 3)),
        **dict.fromkeys(("clip/mean", "clip/min", "clip/max", "clip/std")),
        "num": 3,
        "dropped_by": "zero_variance",
    }
