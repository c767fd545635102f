"""Mean luma: a reward that needs no model, for tests and first steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from verst.config.sections import BrightnessReward
from verst.rewards.base import frames_of
from verst.rewards.looks import REC_601


class Brightness:
    """Mean Rec. 601 luma over frames and pixels, in [0, 1]: 0 is black, 1 is white."""

    def __init__(self, config: BrightnessReward) -> None:
        self.name: str = config.type

    def score(self, media: Tensor, prompts: Sequence[str]) -> list[float]:
        """See Reward.score; the prompts are not read."""
        frames = frames_of(media, prompts)
        luma: np.ndarray = frames.mean(axis=(1, 2, 3), dtype=np.float64) @ REC_601 / 255
        return [float(value) for value in luma]
