"""One table each: what scores samples, and how its workers are run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from verst.config.basis import NonNegativeInt, Number, PositiveFloat, PositiveInt, Section
from verst.config.plugins import ObjectPath


class RewardBase(Section):
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


class OcrReward(RewardBase):
    type: Literal["ocr"] = "ocr"
    mode: Literal["line", "scene"] = "line"
    """line: the image is one line of text, recogniser only; scene: find text first."""
    target: Literal["prompt", "quoted"] = "prompt"
    """Compare with the whole prompt, or with the text between its double quotes."""
    threads: NonNegativeInt = 0
    """CPU threads of the recogniser; 0 = all cores."""


class JpegSizeReward(RewardBase):
    type: Literal["jpeg_size"] = "jpeg_size"
    quality: Annotated[int, Field(ge=1, le=95, strict=True)] = 95
    direction: Literal["smaller", "larger"] = "smaller"
    """Which file size is better."""


class BrightnessReward(RewardBase):
    type: Literal["brightness"] = "brightness"
    """Mean luma in [0, 1]."""


class CustomReward(RewardBase):
    type: Literal["custom"] = "custom"
    path: ObjectPath
    """`module:object`, or the name of an installed entry point of the group verst.rewards: a function called with the
    samples' media and prompts that returns one number a sample, or a class with such a method `score`."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "custom"
    """Name in metrics."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of the class when it is made."""


RewardConfig = Annotated[OcrReward | JpegSizeReward | BrightnessReward | CustomReward, Field(discriminator="type")]
