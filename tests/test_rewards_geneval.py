"""GenEval: its rules on written-out boxes, colours on painted pictures, and both detectors on random checkpoints."""

import judge_fixtures as toys
import numpy as np
import pytest
import torch
from judge_fixtures import batch, noise
from PIL import Image

from verst.config.sections import GenEvalReward
from verst.errors import ConfigError, PromptError, RewardError
from verst.rewards import geneval, make_reward
from verst.rewards.clip import Clip
from verst.rewards.geneval import ColorReader, cut_out, kept
from verst.rewards.geneval_rules import COLORS, Found, clause_problem, relations, soft, strict
from verst.rewards.preflight import check_rewards


def at(x, y, size=10, score=0.95):
    return Found(box=(x, y, x + size, y + size), score=score)


def no_colors(found, name):
    raise AssertionError("no colour was asked for")


def painted(*colors):
    return lambda found, name: list(colors[: len(found)])


def asked(*include, exclude=(), tag="counting"):
    return {"tag": tag, "include": list(include), "exclude": list(exclude)}


CAT = {"class": "cat", "count": 1}
TWO_CATS = {"class": "cat", "count": 2}


@pytest.mark.parametrize(
    ("metadata", "objects", "is_strict", "is_soft"),
    [
        (asked(CAT), {"cat": [at(0, 0)]}, 1.0, 1.0),
        (asked(CAT), {}, 0.0, 0.0),
        # One cat was asked for: GenEval lets more pass, a reward of exact counts does not.
        (asked(CAT), {"cat": [at(0, 0), at(20, 0)]}, 1.0, 0.0),
        (asked(CAT), {"cat": [at(10 * i, 0) for i in range(4)]}, 1.0, -2.0),
        (asked(CAT, {"class": "dog", "count": 1}), {"cat": [at(0, 0)]}, 0.0, 0.5),
        (asked(TWO_CATS, exclude=[{"class": "cat", "count": 3}]), {"cat": [at(0, 0), at(9, 9)]}, 1.0, 1.0),
        (asked(TWO_CATS, exclude=[{"class": "cat", "count": 3}]), {"cat": [at(0, 0)] * 3}, 0.0, 0.5),
        (asked(TWO_CATS, exclude=[{"class": "cat", "count": 3}]), {"cat": [at(0, 0)]}, 0.0, 0.5),
    ],
)
def test_objects_and_counts(metadata, objects, is_strict, is_soft):
    assert strict(metadata, objects, no_colors) == is_strict
    assert soft(metadata, objects, no_colors) == pytest.approx(is_soft)


@pytest.mark.parametrize(
    ("clause", "objects", "seen", "is_strict", "is_soft"),
    [
        ({**CAT, "color": "red"}, {"cat": [at(0, 0)]}, ("red",), 1.0, 1.0),
        ({**CAT, "color": "red"}, {"cat": [at(0, 0)]}, ("blue",), 0.0, 0.5),
        ({**TWO_CATS, "color": "red"}, {"cat": [at(0, 0), at(20, 0)]}, ("red", "blue"), 0.0, 0.75),
        # Too few: no colour is looked at, and its credit is 0.
        ({**TWO_CATS, "color": "red"}, {"cat": [at(0, 0)]}, ("red",), 0.0, 0.25),
        ({**CAT, "color": "red"}, {}, (), 0.0, 0.0),
    ],
)
def test_colors(clause, objects, seen, is_strict, is_soft):
    assert strict(asked(clause), objects, painted(*seen)) == is_strict
    assert soft(asked(clause), objects, painted(*seen)) == pytest.approx(is_soft)


def test_color_attribution_asks_for_each_objects_own_colour():
    metadata = asked({**CAT, "color": "red"}, {"class": "dog", "count": 1, "color": "blue"}, tag="color_attr")
    objects = {"cat": [at(0, 0)], "dog": [at(30, 0)]}
    swapped = {"cat": "blue", "dog": "red"}
    right = {"cat": "red", "dog": "blue"}
    assert strict(metadata, objects, lambda found, name: [right[name]]) == 1.0
    assert strict(metadata, objects, lambda found, name: [swapped[name]]) == 0.0
    assert soft(metadata, objects, lambda found, name: [swapped[name]]) == pytest.approx(0.5)


def test_position_is_checked_against_an_earlier_clause():
    metadata = asked({"class": "dog", "count": 1}, {**CAT, "position": ["left of", 0]}, tag="position")
    dog = [at(50, 0)]
    assert strict(metadata, {"dog": dog, "cat": [at(0, 0)]}, no_colors) == 1.0
    assert soft(metadata, {"dog": dog, "cat": [at(0, 0)]}, no_colors) == 1.0
    assert strict(metadata, {"dog": dog, "cat": [at(90, 0)]}, no_colors) == 0.0
    assert soft(metadata, {"dog": dog, "cat": [at(90, 0)]}, no_colors) == pytest.approx(2 / 3)
    assert soft(metadata, {"cat": [at(0, 0)]}, no_colors) == pytest.approx(1 / 3)
    assert soft(metadata, {}, no_colors) == 0.0


def test_relations_of_boxes():
    def ten(x, y):
        return (x, y, x + 10, y + 10)

    assert relations(ten(0, 0), ten(50, 0)) == {"left of"}
    assert relations(ten(50, 0), ten(0, 0)) == {"right of"}
    assert relations(ten(0, 0), ten(0, 50)) == {"above"}
    assert relations(ten(0, 50), ten(0, 0)) == {"below"}
    assert relations(ten(50, 50), ten(0, 0)) == {"right of", "below"}
    # An offset of 2 is a tenth of the summed sizes: nothing is left of it.
    assert relations(ten(2, 0), ten(0, 0)) == relations(ten(0, 0), ten(0, 0)) == set()
    # 3 of 10 along y leaves 1 of about 10.4 after the slack: only x counts.
    assert relations(ten(10, 3), ten(0, 0)) == {"right of"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "has no tag"),
        ({"tag": "colors"}, "has no list `include`"),
        (asked(), "has no list `include`"),
        (asked({"count": 1}), "clause 0 has no class"),
        (asked({"class": "unicorn", "count": 1}), "class 'unicorn' is unknown"),
        (asked({"class": "cat"}), "count = None"),
        (asked({**CAT, "count": 0}), "count = 0"),
        (asked({**CAT, "color": "mauve"}), "color 'mauve' is none of red"),
        (asked({**CAT, "position": ["under", 0]}), "position"),
        (asked({**CAT, "position": ["above", 0]}), "earlier clause"),
        (asked(CAT, exclude=[{"class": "cat", "count": "3"}]), "count = '3'"),
        (asked(CAT, {**CAT, "position": ["above", 0]}, exclude=[{"class": "cat", "count": 3}]), None),
    ],
)
def test_rows_that_cannot_be_scored_are_named(row, problem):
    found = clause_problem(row, {"cat", "dog"})
    assert found is None if problem is None else problem in found


def test_only_confident_objects_count_sixteen_at_most():
    scores = [0.2, 0.31, 0.89, 0.91, 0.5]
    objects = {"cat": [at(0, 0, score=s) for s in scores], "dog": [at(0, 0, score=0.1)]}
    assert [one.score for one in kept(objects, counting=False)["cat"]] == [0.91, 0.89, 0.5, 0.31]
    assert [one.score for one in kept(objects, counting=True)["cat"]] == [0.91]
    assert "dog" not in kept(objects, counting=False)
    assert len(kept({"cat": [at(0, 0)] * 20}, counting=False)["cat"]) == 16


def test_an_object_is_cut_out_on_grey():
    frame = noise(1, 30, 40)[0, 0]
    mask = np.zeros((30, 40), bool)
    mask[5:9, 10:16] = True
    cut = cut_out(frame, Found(box=(9.6, 5.4, 18.2, 9.0), score=1.0, mask=mask))
    grey = Image.new("RGB", (40, 30), "#999")
    pasted = Image.composite(Image.fromarray(frame.numpy()), grey, Image.fromarray(mask))
    np.testing.assert_array_equal(cut.numpy(), np.asarray(pasted.crop((10, 5, 18, 9))))
    assert cut_out(frame, Found(box=(39.9, 3.0, 39.9, 3.0), score=1.0)).shape == (1, 1, 3)
    assert cut_out(frame, Found(box=(-4.0, -4.0, 90.0, 90.0), score=1.0)).shape == (30, 40, 3)


PURE = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


class ColorSight:
    """A CLIP that knows three colours: of a crop the mean pixel, of a sentence the colour in it."""

    def images(self, frames):
        return torch.nn.functional.normalize(frames.double().mean(dim=(1, 2)), dim=-1)

    def sentences(self, sentences):
        vectors = [next((v for c, v in PURE.items() if f" {c}" in s), (1, 1, 1)) for s in sentences]
        return torch.nn.functional.normalize(torch.tensor(vectors).double(), dim=-1)


def test_colours_are_read_object_by_object():
    frame = torch.full((30, 40, 3), 90, dtype=torch.uint8)
    frame[5:15, 5:15] = torch.tensor([200, 10, 10], dtype=torch.uint8)
    frame[5:15, 25:35] = torch.tensor([10, 10, 220], dtype=torch.uint8)
    reader = ColorReader(ColorSight())
    assert reader.read(frame, [at(5, 5), at(25, 5)], "cat") == ["red", "blue"]
    assert {"red", "blue"} < set(COLORS)


@pytest.fixture(scope="module")
def clip_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    # Long enough for the sentences about colours, a token a letter.
    toys.clip_folder(folder, num_tokens=77)
    return str(folder)


@pytest.mark.parametrize("make", [toys.mask2former_folder, toys.detr_folder])
def test_detectors_give_named_boxes_row_by_row(tmp_path, clip_path, make):
    make(tmp_path)
    config = GenEvalReward(path=str(tmp_path), clip=clip_path, batch_size=2)
    detector = geneval.detector_of(config)
    assert detector.classes == {"person", "cat", "computer mouse", "couch"}
    frames = noise(3, 48, 64, seed=4)[:, 0]
    together = detector.detect(frames)
    assert any(together)
    for frame, objects in zip(frames, together, strict=True):
        (alone,) = detector.detect(frame[None])
        assert {name: len(found) for name, found in alone.items()} == {n: len(f) for n, f in objects.items()}
        for name, found in objects.items():
            for one, other in zip(found, alone[name], strict=True):
                assert one.score == pytest.approx(other.score, abs=1e-4)
                assert one.box == pytest.approx(other.box, abs=1e-2)
                assert one.score > 0.3
                if one.mask is not None:
                    assert one.mask.shape == (48, 64)
                    assert one.mask[round(one.box[1]) : round(one.box[3]), round(one.box[0]) : round(one.box[2])].any()


@pytest.mark.parametrize("rule", ["strict", "soft"])
def test_geneval_end_to_end_scores_what_its_detector_found(tmp_path, clip_path, rule):
    toys.detr_folder(tmp_path)
    config = GenEvalReward(path=str(tmp_path), clip=clip_path, rule=rule, batch_size=2)
    reward, colors = make_reward(config), ColorReader(Clip(clip_path, config))
    media = noise(3, 48, 64, seed=4)
    found = [kept(objects, counting=False) for objects in geneval.detector_of(config).detect(media[:, 0])]
    name, there = next(iter(found[0].items()))
    rows = ({"tag": "two_object", "include": [{"class": name, "count": len(there), "color": "red"}]},) * 3
    rule_of = {"strict": strict, "soft": soft}[rule]
    want = [
        rule_of(row, objects, lambda f, n, frame=frame: colors.read(frame, f, n))
        for row, objects, frame in zip(rows, found, media[:, 0], strict=True)
    ]
    scores = reward.score(batch(media, metadata=rows))
    assert scores == want
    assert scores[0] >= (0.5 if rule == "soft" else 0.0)
    order = [2, 0, 1]
    assert reward.score(batch(media[order], metadata=rows)) == [want[i] for i in order]
    with pytest.raises(RewardError, match=r"metadata of prompt 'prompt 0' has no tag"):
        reward.score(batch(media))


def test_prompts_without_usable_metadata_are_listed_before_the_run(tmp_path, clip_path):
    toys.detr_folder(tmp_path)
    config = GenEvalReward(path=str(tmp_path), clip=clip_path)
    mouse = asked({"class": "computer mouse", "count": 1})
    check_rewards([config], ["a mouse"], [mouse])
    with pytest.raises(
        PromptError, match=r"2 prompts cannot be scored: metadata of prompt 'a dog' class 'dog' is unknown"
    ):
        check_rewards([config], ["a dog", "a mouse", "a cat"], [asked({"class": "dog", "count": 1}), mouse, {}])
    with pytest.raises(ConfigError, match=r"reward geneval: clip = '/absent' is no folder"):
        check_rewards([GenEvalReward(path=str(tmp_path), clip="/absent")], ["a mouse"], [mouse])
