"""Rewards on real pictures: what they read, measure and refuse."""

import asyncio
import math
import re
import sys
import tomllib
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from pydantic import TypeAdapter

from verst.config.rewards import ContrastReward, FramesConfig, RewardConfig, SharpnessReward
from verst.config.sections import BrightnessReward, JpegSizeReward, OcrReward, PythonReward
from verst.errors import ConfigError, PromptError, RewardError
from verst.rewards import REWARDS, RewardBatch, make_reward
from verst.rewards.frames import FrameWise, spread
from verst.rewards.local import LocalRewards
from verst.rewards.ocr import edit_distance, normalise, prompt_problems, reading_order, similarity, target_text
from verst.rewards.preflight import check_rewards

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
"""matplotlib ships DejaVu, so that the tests need no font of the system."""


def picture(text, *, size=(64, 32), points=20, font="DejaVuSans.ttf", at=None, blur=0.0):
    image = Image.new("RGB", size, (235, 240, 225))
    draw = ImageDraw.Draw(image)
    draw.text(
        at or (size[0] / 2, size[1] / 2), text, font=ImageFont.truetype(FONTS / font, points), fill=0, anchor="mm"
    )
    return np.asarray(image.filter(ImageFilter.GaussianBlur(blur)))


def media(*frames):
    """One-frame clips [B, 1, H, W, 3]."""
    return torch.from_numpy(np.stack(frames))[:, None]


def clip(value, frames=1, size=(32, 64)):
    return torch.full((frames, *size, 3), value, dtype=torch.uint8)


def scored(reward, clips, prompts):
    return reward.score(RewardBatch.plain(clips, prompts))


def one(value):
    return RewardBatch.plain(clip(value)[None], ["x"])


@pytest.fixture(scope="module")
def line():
    return make_reward(OcrReward(threads=1))


@pytest.mark.parametrize("font", ["DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf"])
def test_line_reads_digits_and_words_of_small_pictures(line, font):
    texts = ["0123", "4567", "8890", "2222", "7777", "1117", "bread", "ocean", "cat", "hello"]
    for blur in (0.0, 1.0):
        scores = scored(line, media(*(picture(t, font=font, blur=blur) for t in texts)), texts)
        assert np.mean(scores) > 0.97, dict(zip(texts, scores, strict=True))


def test_line_scores_by_edit_distance_whatever_case_and_spaces(line):
    frame = picture("4711")
    prompts = ["4711", "47 11", "4712", "471", "99", "47", "0000000000"]
    scores = scored(line, media(*[frame] * len(prompts)), prompts)
    assert scores == pytest.approx([1.0, 1.0, 0.75, 2 / 3, 0.0, 0.0, 0.0])
    assert scored(line, media(picture("Bread")), ["bREAD"]) == [1.0]
    assert scored(line, media(np.zeros((32, 64, 3), np.uint8)), ["4711"]) == [0.0]


def test_a_score_depends_on_its_own_picture_alone(line):
    frames = [picture(f"{i:04d}", blur=1.5) for i in range(0, 9999, 476)]
    prompts = ["1234"] * len(frames)
    together = scored(line, media(*frames), prompts)
    assert together == [scored(line, media(frame), ["1234"])[0] for frame in frames]


def test_clips_are_the_mean_of_their_frames(line):
    frames = torch.from_numpy(np.stack([picture("4711")] * 4 + [picture("4712")] * 4))[None]
    assert scored(line, frames, ["4711"]) == [pytest.approx((1 + 0.75) / 2)]
    assert spread(1, 4) == [0]
    assert spread(8, 4) == [1, 3, 5, 7]
    assert spread(81, 1) == [40]
    assert spread(3, 4) == [0, 1, 2]


def test_scene_finds_quoted_text_and_reads_in_order():
    scene = Image.new("RGB", (320, 240), (120, 160, 120))
    draw = ImageDraw.Draw(scene)
    large, small = (ImageFont.truetype(FONTS / "DejaVuSans-Bold.ttf", p) for p in (40, 28))
    draw.text((160, 80), "OPEN", font=large, fill=(255, 255, 255), anchor="mm")
    draw.text((160, 160), "all day", font=small, fill=(255, 255, 0), anchor="mm")
    reward = make_reward(OcrReward(mode="scene", target="quoted", threads=1))
    frames = media(np.asarray(scene), np.full((240, 320, 3), 90, np.uint8))
    prompts = ['a shop with a sign "Open all day"', 'a wall with "Open"']
    assert scored(reward, frames, prompts) == [1.0, 0.0]


def test_reading_order_is_by_line_and_then_from_the_left():
    def box(x, y, width=20, height=10):
        return [[x, y], [x + width, y], [x + width, y + height], [x, y + height]]

    boxes = np.array([box(50, 2), box(0, 40), box(0, 0), box(90, 4), box(60, 38)], dtype=float)
    assert reading_order(boxes) == [2, 0, 3, 1, 4]


def test_the_target_is_the_prompt_or_its_quoted_part():
    assert target_text('A sign "Hello World" and "42"', "quoted") == "helloworld42"
    assert target_text("a sign “Hello”", "quoted") == "hello"
    assert target_text("Hello World", "prompt") == "helloworld"
    with pytest.raises(RewardError, match="no text in double quotes"):
        target_text("a sign", "quoted")
    quoted = OcrReward(target="quoted")
    problems = prompt_problems(quoted, ['"a"', "b", 'c ""'], [{}] * 3)
    assert len(problems) == 2
    assert "'b'" in problems[0]
    with pytest.raises(PromptError, match=r"1 prompts cannot be scored: .*'b'"):
        check_rewards([BrightnessReward(), quoted], ['"a"', "b"], [{}] * 2)
    check_rewards([OcrReward(), BrightnessReward()], ["b"], [{}])


def test_edit_distance_and_normal_form():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    assert normalise(" ４７ Aﬁ\t") == "47afi"  # noqa: RUF001 - full-width digits are what is tested
    assert similarity("abcdefgh", "ab") == 0.0
    assert similarity("ab", "ab") == 1.0


def test_brightness_is_mean_luma():
    reward = make_reward(BrightnessReward())
    red = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    red[..., 0] = 255
    half = torch.cat([clip(0, size=(8, 8)), clip(255, size=(8, 8))])
    assert scored(
        reward, torch.stack([clip(0, size=(8, 8)), clip(255, size=(8, 8)), red]), ["", "", ""]
    ) == pytest.approx([0.0, 1.0, 0.299])
    assert scored(reward, half[None], [""]) == pytest.approx([0.5])


def test_sharpness_and_contrast_of_known_pictures():
    stripes = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    stripes[:, :, ::2] = 255
    batch = torch.stack([clip(90, size=(8, 8)), stripes])
    # Every step across is of full size, none down is.
    assert scored(make_reward(SharpnessReward()), batch, ["", ""]) == pytest.approx([0.0, 0.5])
    assert scored(make_reward(ContrastReward()), batch, ["", ""]) == pytest.approx([0.0, 1.0])


def test_jpeg_size_orders_pictures_and_is_bounded():
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 32, 64, 3), dtype=np.uint8))
    batch, prompts = torch.stack([clip(128), noise]), ["", ""]
    smaller = scored(make_reward(JpegSizeReward()), batch, prompts)
    larger = scored(make_reward(JpegSizeReward(direction="larger")), batch, prompts)
    assert larger == [-value for value in smaller]
    raw_kb = 32 * 64 * 3 / 1000
    assert 0 < larger[0] < larger[1] <= raw_kb
    coarse = scored(make_reward(JpegSizeReward(direction="larger", quality=10)), batch, prompts)
    assert coarse[1] < larger[1]
    assert scored(make_reward(JpegSizeReward(direction="larger")), clip(0, size=(1, 1))[None], [""]) == [0.003]


MEDIA = torch.zeros(2, 1, 8, 8, 3, dtype=torch.uint8)
SOUND = torch.zeros(2, 1, 100)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"media": torch.zeros(2, 1, 8, 8, 3)}, "uint8.*float32"),
        ({"media": torch.zeros(2, 8, 8, 3, dtype=torch.uint8)}, r"\[B, F, H, W, 3\]"),
        ({"media": torch.zeros(2, 1, 3, 8, 8, dtype=torch.uint8)}, r"\[2, 1, 3, 8, 8\]"),
        ({"media": torch.zeros(2, 0, 8, 8, 3, dtype=torch.uint8)}, r"\[2, 0, 8, 8, 3\]"),
        ({"prompts": ("a",)}, "1 prompts for 2 samples"),
        ({"metadata": ({},)}, "one metadata a sample, got 1 for 2"),
        ({"fps": 0.0}, "fps above 0"),
        ({"audio": SOUND}, "audio and sample_rate together"),
        ({"sample_rate": 16000}, "audio and sample_rate together"),
        ({"audio": SOUND.half(), "sample_rate": 16000}, "float32.*float16"),
        ({"audio": SOUND[:1], "sample_rate": 16000}, r"\[2, channels, n\], got \[1, 1, 100\]"),
        ({"audio": SOUND + 1.5, "sample_rate": 16000}, r"\[-1, 1\], got a value of magnitude 1.5"),
        ({"audio": SOUND * math.nan, "sample_rate": 16000}, "magnitude nan"),
        ({"latents": {"visual": torch.zeros(1, 4)}}, r"latents of 2 samples, got \[1, 4\] in stream visual"),
    ],
)
def test_a_batch_that_is_none_is_refused(wrong, message):
    right = {"media": MEDIA, "prompts": ("a", "b"), "metadata": ({}, {})}
    assert len(RewardBatch(**right)) == 2
    with pytest.raises(RewardError, match=message):
        RewardBatch(**(right | wrong))


def test_rows_of_a_batch_are_whole_samples():
    batch = RewardBatch(
        media=torch.arange(3, dtype=torch.uint8)[:, None, None, None, None].expand(3, 2, 4, 4, 3),
        prompts=("a", "b", "c"),
        metadata=({"i": 0}, {"i": 1}, {"i": 2}),
        fps=8.0,
        audio=torch.arange(3)[:, None, None] / 4,
        sample_rate=16000,
        latents={"visual": torch.arange(3.0)[:, None]},
    )
    rows = batch.rows([2, 0])
    assert (rows.prompts, rows.metadata) == (("c", "a"), ({"i": 2}, {"i": 0}))
    assert rows.media[:, 0, 0, 0, 0].tolist() == [2, 0]
    assert rows.audio.flatten().tolist() == [0.5, 0.0]
    assert rows.latents["visual"].flatten().tolist() == [2.0, 0.0]
    assert (rows.fps, rows.sample_rate) == (8.0, 16000)


class Frames:
    """Scores a picture by its first pixel; 99 stands for a failure, 98 for NaN."""

    name = "frames"

    def score(self, batch):
        values = [float(v) for v in batch.pictures()[:, 0, 0, 0]]
        return [RewardError("broken frame") if v == 99 else math.nan if v == 98 else v for v in values]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ({"policy": "first"}, [10.0, 20.0]),
        ({"policy": "middle"}, [14.0, 24.0]),
        ({"policy": "last"}, [17.0, 27.0]),
        ({"policy": "uniform", "count": 2}, [14.0, 24.0]),
        ({"policy": "uniform", "count": 2, "reduce": "min"}, [12.0, 22.0]),
        ({"policy": "uniform", "count": 2, "reduce": "max"}, [16.0, 26.0]),
        ({"policy": "all"}, [13.5, 23.5]),
        ({"policy": "uniform", "count": 99}, [13.5, 23.5]),
    ],
)
def test_frames_of_clips_by_policy(frames, expected):
    first = torch.arange(8, dtype=torch.uint8) + torch.tensor([[10], [20]], dtype=torch.uint8)
    clips = first[:, :, None, None, None].expand(2, 8, 4, 4, 3)
    assert scored(FrameWise(Frames(), FramesConfig(**frames)), clips, ["a", "b"]) == expected


def test_a_clip_fails_with_one_of_its_frames():
    first = torch.tensor([[1, 2], [1, 99], [1, 98]], dtype=torch.uint8)
    clips = first[:, :, None, None, None].expand(3, 2, 4, 4, 3)
    for reduce in ("mean", "min", "max"):
        scores = scored(FrameWise(Frames(), FramesConfig(policy="all", reduce=reduce)), clips, ["a", "b", "c"])
        assert scores[0] == {"mean": 1.5, "min": 1.0, "max": 2.0}[reduce]
        assert isinstance(scores[1], RewardError)
        assert math.isnan(scores[2])
    with pytest.raises(RewardError, match="takes pictures, got clips of 2 frames"):
        scored(Frames(), clips, ["a", "b", "c"])


def contrast(clips, prompts, scale=1.0):
    return [scale * float(c.float().std()) for c in clips]


class Counting:
    def __init__(self, start=0):
        self.start = start

    def score(self, clips, prompts):
        return [float(self.start + len(prompt)) for prompt in prompts]


async def asynchronous(clips, prompts, metadata):
    await asyncio.sleep(0)
    return [row["worth"] for row in metadata]


async def one_asynchronous(clip, prompt, *, metadata, audio, fps, sample_rate):
    await asyncio.sleep(0)
    return metadata["worth"] + len(audio) + fps + sample_rate + len(prompt) + clip.ndim


def whole(batch, factor):
    return [factor * len(batch)] * len(batch)


def demanding(clips, prompts, threshold):
    return [threshold] * len(prompts)


def out_of_order(clips, prompts):
    raise ValueError("out of order")


number = 3


def rated_batch():
    return RewardBatch(
        media=MEDIA,
        prompts=("a", "bb"),
        metadata=({"worth": 0.5}, {"worth": 0.25}),
        fps=8.0,
        audio=torch.zeros(2, 2, 10),
        sample_rate=100,
    )


def test_python_rewards_are_functions_or_classes():
    function = make_reward(PythonReward(path=f"{__name__}:contrast", name="contrast", options={"scale": 0.0}))
    assert (function.name, scored(function, clip(7)[None], ["a"])) == ("contrast", [0.0])
    made = make_reward(PythonReward(path=f"{__name__}:Counting", options={"start": 5}))
    assert scored(made, clip(7)[None], ["ab"]) == [7.0]
    assert made.name == "python"


def test_python_rewards_get_what_they_name():
    assert make_reward(PythonReward(path=f"{__name__}:asynchronous")).score(rated_batch()) == [0.5, 0.25]
    one_by_one = PythonReward(path=f"{__name__}:one_asynchronous", batched=False)
    assert make_reward(one_by_one).score(rated_batch()) == [115.5, 116.25]
    record = PythonReward(path=f"{__name__}:whole", options={"factor": 3})
    assert make_reward(record).score(rated_batch()) == [6, 6]


def test_python_reward_of_a_file_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_own_reward.py").write_text("def zero(media, prompts):\n    return [0.5] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert scored(make_reward(PythonReward(path="my_own_reward:zero")), clip(7)[None], ["a"]) == [0.5]


def test_python_reward_of_an_installed_package(tmp_path, monkeypatch):
    info = tmp_path / "own_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[verst.rewards]\nfull-marks = own_rewards:full\n")
    (tmp_path / "own_rewards.py").write_text("def full(media, prompts):\n    return [1.0] * len(prompts)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert scored(make_reward(PythonReward(path="full-marks")), clip(7)[None], ["a"]) == [1.0]


@pytest.mark.parametrize(
    ("path", "others", "message"),
    [
        ("no_such_module_of_ours:f", {}, r"rewards\.path.*No module named 'no_such_module_of_ours'"),
        (f"{__name__}:absent", {}, "absent"),
        (f"{__name__}:number", {}, "neither a function nor a class"),
        (f"{__name__}:Counting", {"options": {"step": 1}}, "step"),
        (f"{__name__}:demanding", {}, r"threshold.*rewards\.options"),
        (f"{__name__}:contrast", {"options": {"threshold": 1}}, "threshold"),
        (f"{__name__}:asynchronous", {"options": {"metadata": 1}}, "filled by verst"),
        (f"{__name__}:whole", {"options": {"factor": 1}, "batched": False}, "batched = false"),
        ("builtins:list", {}, "score"),
        ("not-installed", {}, "entry point of the group verst.rewards"),
    ],
)
def test_python_rewards_that_cannot_be_used_are_refused(path, others, message):
    with pytest.raises(ConfigError, match=message):
        make_reward(PythonReward(path=path, **others))


def test_every_reward_of_the_recipe_has_a_class():
    from typing import get_args

    variants = get_args(get_args(RewardConfig)[0])
    assert {variant.model_fields["type"].default for variant in variants} == set(REWARDS)


def test_local_rewards_combine_by_name():
    scores = asyncio.run(LocalRewards([BrightnessReward(), JpegSizeReward()]).score(one(255)))
    assert scores.by_reward["brightness"] == (pytest.approx(1.0),)
    assert scores.by_reward["jpeg_size"][0] < 0
    assert scores.num_failures == 0


def test_local_rewards_stop_or_mask_by_policy():
    failing = PythonReward(path=f"{__name__}:out_of_order", name="custom", attempts=1)
    with pytest.raises(RewardError, match="reward custom failed 1 times"):
        asyncio.run(LocalRewards([failing]).score(one(1)))
    masked = LocalRewards([failing.model_copy(update={"on_failure": "mask"}), BrightnessReward()])
    scores = asyncio.run(masked.score(one(0)))
    assert math.isnan(scores.by_reward["custom"][0])
    assert scores.by_reward["brightness"] == (0.0,)
    assert scores.num_failures == 1


@pytest.mark.parametrize("by", ["module", "entry_point"])
def test_the_rewards_of_the_documentation_work(tmp_path, monkeypatch, by):
    text = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text()
    code = re.search(r"```python\n(# my_rewards\.py\n.*?)```", text, re.DOTALL)[1]
    tables = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]
    assert len(code.splitlines()) < 30
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    if by == "module":
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
    else:
        points = next(table["project"]["entry-points"]["verst.rewards"] for table in tables if "project" in table)
        info = tmp_path / "documented-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: documented\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[verst.rewards]", *lines]))
        monkeypatch.syspath_prepend(tmp_path)
        tables = [{"rewards": [{**t, "path": t["name"]} if t.get("name") in points else t for t in table["rewards"]]}
                  for table in tables if "rewards" in table]  # fmt: skip
    adapter = TypeAdapter(RewardConfig)
    configs = [adapter.validate_python(table) for block in tables for table in block.get("rewards", [])]
    assert {config.type for config in configs} >= {"python", "openai"}
    own = {config.name: make_reward(config) for config in configs if config.type == "python"}
    batch = RewardBatch(
        media=torch.tensor([[255, 0, 51], [0, 0, 51]], dtype=torch.uint8)[:, None, None, None].expand(2, 1, 4, 4, 3),
        prompts=("a", "b"),
        metadata=({"colour": "blue"}, {"colour": "red"}),
    )
    assert own["redness"].score(batch) == pytest.approx([2.0, 0.0])
    assert own["wanted_colour"].score(batch) == pytest.approx([0.2, 0.0])
    assert own["novelty"].score(batch) == pytest.approx([math.sqrt(math.sqrt(16) / 2)] * 2)
