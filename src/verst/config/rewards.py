"""One table each: what scores samples, and how its workers are run."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from verst.config.basis import Flag, NonNegativeInt, Number, PositiveFloat, PositiveInt, Section
from verst.config.plugins import ObjectPath

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class RewardBase(Section):
    row_independent: ClassVar[bool] = False
    """A sample's score is the same bits whatever samples are scored in the same call."""

    name: Name | None = None
    """Name in metrics; left out: the type. Two rewards of one type need names of their own."""
    weight: Number = 1.0
    """Weight in the mixture."""
    workers: PositiveInt = 1
    """Processes that score microgroups."""
    attempts: PositiveInt = 3
    """Calls before a failure is final."""
    timeout_s: PositiveFloat = 120.0
    """Seconds one call may take."""
    on_failure: Literal["stop", "mask"] = "stop"
    """A final failure stops the run, or leaves the sample out and counts it; it is never a score."""


class FramesConfig(Section):
    """Which frames of a clip an image reward sees. An image is its own only frame, whatever stands here."""

    policy: Literal["first", "middle", "last", "uniform", "all"] = "middle"
    """One frame, `count` frames spread evenly over the clip, or every frame."""
    count: PositiveInt = 4
    """Frames of the policy uniform; a shorter clip gives all it has."""
    reduce: Literal["mean", "min", "max"] = "mean"
    """From the scores of the frames to the score of the clip."""


class ImageRewardBase(RewardBase):
    """A reward of single pictures; of clips by `frames`."""

    frames: FramesConfig = FramesConfig()
    """Which frames of a clip it sees, and how their scores become one."""


class OcrReward(ImageRewardBase):
    row_independent: ClassVar[bool] = True

    type: Literal["ocr"] = "ocr"
    mode: Literal["line", "scene"] = "line"
    """line: the image is one line of text, recogniser only; scene: find text first."""
    target: Literal["prompt", "quoted"] = "prompt"
    """Compare with the whole prompt, or with the text between its double quotes."""
    threads: NonNegativeInt = 0
    """CPU threads of the recogniser; 0 = all cores."""
    frames: FramesConfig = FramesConfig(policy="uniform")
    """The mean over four frames of a clip unless said otherwise."""


class JpegSizeReward(ImageRewardBase):
    row_independent: ClassVar[bool] = True

    type: Literal["jpeg_size"] = "jpeg_size"
    quality: Annotated[int, Field(ge=1, le=95, strict=True)] = 95
    direction: Literal["smaller", "larger"] = "smaller"
    """Which file size is better."""
    frames: FramesConfig = FramesConfig(policy="all")
    """The mean over all frames of a clip unless said otherwise."""


class BrightnessReward(ImageRewardBase):
    row_independent: ClassVar[bool] = True

    type: Literal["brightness"] = "brightness"
    """Mean luma in [0, 1]."""
    frames: FramesConfig = FramesConfig(policy="all")
    """The mean over all frames of a clip unless said otherwise."""


class PythonReward(RewardBase):
    type: Literal["python"] = "python"
    path: ObjectPath
    """`module:object`, or the name of an installed entry point of the group verst.rewards: a function called with the
    samples' media and prompts that returns one number a sample, or a class with such a method `score`. Parameters
    called metadata, fps, audio or sample_rate get these; one called batch gets all in one record."""
    batched: Flag = True
    """Called with all samples at once; false: once a sample, with one value of each kind, returning one number."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of the class when it is made."""


RewardConfig = Annotated[OcrReward | JpegSizeReward | BrightnessReward | PythonReward, Field(discriminator="type")]


def reward_name(reward: RewardConfig) -> str:
    """The reward's name in metrics."""
    return reward.name or reward.type
