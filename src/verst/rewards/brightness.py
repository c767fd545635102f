"""Mean luma: a reward that needs no model, for tests and first steps."""

from __future__ import annotations

import numpy as np

from verst.config.rewards import BrightnessReward, reward_name
from verst.rewards.base import RewardBatch
from verst.rewards.looks import REC_601


class Brightness:
    """Mean Rec. 601 luma over the pixels, in [0, 1]: 0 is black, 1 is white."""

    def __init__(self, config: BrightnessReward) -> None:
        self.name = reward_name(config)

    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score; the prompts are not read."""
        luma: np.ndarray = batch.pictures().mean(axis=(1, 2), dtype=np.float64) @ REC_601 / 255
        return [float(value) for value in luma]
