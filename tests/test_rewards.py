"""Rewards on real pictures: what they read, measure and refuse."""

import asyncio
import math
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from verst.config.sections import BrightnessReward, CustomReward, JpegSizeReward, OcrReward
from verst.errors import ConfigError, RewardError
from verst.rewards import REWARDS, make_reward, prompt_problems
from verst.rewards.base import spread
from verst.rewards.local import LocalRewards
from verst.rewards.ocr import edit_distance, normalise, reading_order, similarity, target_text

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


@pytest.fixture(scope="module")
def line():
    return make_reward(OcrReward(threads=1))


@pytest.mark.parametrize("font", ["DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf"])
def test_line_reads_digits_and_words_of_small_pictures(line, font):
    texts = ["0123", "4567", "8890", "2222", "7777", "1117", "bread", "ocean", "cat", "hello"]
    for blur in (0.0, 1.0):
        scores = line.score(media(*(picture(t, font=font, blur=blur) for t in texts)), texts)
        assert np.mean(scores) > 0.97, dict(zip(texts, scores, strict=True))


def test_line_scores_by_edit_distance_whatever_case_and_spaces(line):
    frame = picture("4711")
    prompts = ["4711", "47 11", "4712", "471", "99", "47", "0000000000"]
    scores = line.score(media(*[frame] * len(prompts)), prompts)
    assert scores == pytest.approx([1.0, 1.0, 0.75, 2 / 3, 0.0, 0.0, 0.0])
    assert line.score(media(picture("Bread")), ["bREAD"]) == [1.0]
    assert line.score(media(np.zeros((32, 64, 3), np.uint8)), ["4711"]) == [0.0]


def test_a_score_depends_on_its_own_picture_alone(line):
    frames = [picture(f"{i:04d}", blur=1.5) for i in range(0, 9999, 476)]
    prompts = ["1234"] * len(frames)
    together = line.score(media(*frames), prompts)
    assert together == [line.score(media(frame), ["1234"])[0] for frame in frames]


def test_clips_are_the_mean_of_their_frames(line):
    frames = torch.from_numpy(np.stack([picture("4711")] * 4 + [picture("4712")] * 4))[None]
    assert line.score(frames, ["4711"]) == [pytest.approx((1 + 0.75) / 2)]
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
    assert reward.score(frames, prompts) == [1.0, 0.0]


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
    problems = prompt_problems(OcrReward(target="quoted"), ['"a"', "b", 'c ""'])
    assert len(problems) == 2
    assert "'b'" in problems[0]
    assert prompt_problems(OcrReward(), ["b"]) == prompt_problems(BrightnessReward(), [""]) == []


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
    assert reward.score(
        torch.stack([clip(0, size=(8, 8)), clip(255, size=(8, 8)), red]), ["", "", ""]
    ) == pytest.approx([0.0, 1.0, 0.299])
    assert reward.score(half[None], [""]) == pytest.approx([0.5])


def test_jpeg_size_orders_pictures_and_is_bounded():
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 32, 64, 3), dtype=np.uint8))
    batch, prompts = torch.stack([clip(128), noise]), ["", ""]
    smaller = make_reward(JpegSizeReward()).score(batch, prompts)
    larger = make_reward(JpegSizeReward(direction="larger")).score(batch, prompts)
    assert larger == [-value for value in smaller]
    raw_kb = 32 * 64 * 3 / 1000
    assert 0 < larger[0] < larger[1] <= raw_kb
    coarse = make_reward(JpegSizeReward(direction="larger", quality=10)).score(batch, prompts)
    assert coarse[1] < larger[1]
    assert make_reward(JpegSizeReward(direction="larger")).score(clip(0, size=(1, 1))[None], [""]) == [0.003]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(1, 1, 8, 8, 3), "uint8.*float32"),
        (torch.zeros(1, 8, 8, 3, dtype=torch.uint8), r"\[B, F, H, W, 3\]"),
        (torch.zeros(1, 1, 3, 8, 8, dtype=torch.uint8), r"\[1, 1, 3, 8, 8\]"),
        (torch.zeros(1, 0, 8, 8, 3, dtype=torch.uint8), r"\[1, 0, 8, 8, 3\]"),
        (torch.zeros(2, 1, 8, 8, 3, dtype=torch.uint8), "1 prompts for 2 samples"),
    ],
)
def test_wrong_media_is_refused_by_every_reward(line, wrong, message):
    custom = make_reward(CustomReward(path=f"{__name__}:contrast"))
    for reward in (line, make_reward(BrightnessReward()), make_reward(JpegSizeReward()), custom):
        with pytest.raises(RewardError, match=message):
            reward.score(wrong, ["x"])


def contrast(clips, prompts, scale=1.0):
    return [scale * float(c.float().std()) for c in clips]


class Counting:
    def __init__(self, start=0):
        self.start = start

    def score(self, clips, prompts):
        return [float(self.start + len(prompt)) for prompt in prompts]


async def asynchronous(clips, prompts):
    return [0.0 for _ in prompts]


number = 3


def test_custom_rewards_are_functions_or_classes():
    function = make_reward(CustomReward(path=f"{__name__}:contrast", name="contrast", options={"scale": 0.0}))
    assert (function.name, function.score(clip(7)[None], ["a"])) == ("contrast", [0.0])
    made = make_reward(CustomReward(path=f"{__name__}:Counting", options={"start": 5}))
    assert made.score(clip(7)[None], ["ab"]) == [7.0]


def test_custom_reward_of_a_file_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_own_reward.py").write_text("def zero(media, prompts):\n    return [0.5] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert make_reward(CustomReward(path="my_own_reward:zero")).score(clip(7)[None], ["a"]) == [0.5]


def test_custom_reward_of_an_installed_package(tmp_path, monkeypatch):
    info = tmp_path / "own_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[verst.rewards]\nfull-marks = own_rewards:full\n")
    (tmp_path / "own_rewards.py").write_text("def full(media, prompts):\n    return [1.0] * len(prompts)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert make_reward(CustomReward(path="full-marks")).score(clip(7)[None], ["a"]) == [1.0]


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("no_such_module_of_ours:f", {}, "No module named 'no_such_module_of_ours'"),
        (f"{__name__}:absent", {}, "absent"),
        (f"{__name__}:number", {}, "neither a function nor a class"),
        (f"{__name__}:asynchronous", {}, "async def"),
        (f"{__name__}:Counting", {"step": 1}, "step"),
        ("builtins:list", {}, "score"),
        ("not-installed", {}, "entry point of the group verst.rewards"),
    ],
)
def test_custom_rewards_that_cannot_be_used_are_refused(path, options, message):
    with pytest.raises(ConfigError, match=message):
        make_reward(CustomReward(path=path, options=options))


def test_every_reward_of_the_recipe_has_a_class():
    from typing import get_args

    from verst.config.sections import RewardConfig

    variants = get_args(get_args(RewardConfig)[0])
    assert {variant.model_fields["type"].default for variant in variants} == set(REWARDS)


def test_local_rewards_combine_by_name():
    scores = asyncio.run(LocalRewards([BrightnessReward(), JpegSizeReward()]).score(clip(255)[None], ["x"]))
    assert scores.by_reward["brightness"] == (pytest.approx(1.0),)
    assert scores.by_reward["jpeg_size"][0] < 0
    assert scores.num_failures == 0


def test_local_rewards_stop_or_mask_by_policy():
    failing = CustomReward(path="builtins:len", attempts=1)
    with pytest.raises(RewardError, match="reward custom failed 1 times"):
        asyncio.run(LocalRewards([failing]).score(clip(1)[None], ["x"]))
    masked = LocalRewards([failing.model_copy(update={"on_failure": "mask"}), BrightnessReward()])
    scores = asyncio.run(masked.score(clip(0)[None], ["x"]))
    assert math.isnan(scores.by_reward["custom"][0])
    assert scores.by_reward["brightness"] == (0.0,)
    assert scores.num_failures == 1
