"""Sharpness by the differences of neighbouring pixels: no model, for tests and as a watched reward."""

from __future__ import annotations

from verst.config.rewards import SharpnessReward, reward_name
from verst.rewards import looks
from verst.rewards.base import RewardBatch


class Sharpness:
    """Mean absolute luma difference of neighbouring pixels, in [0, 1]: 0 is flat; noise is sharp as well."""

    def __init__(self, config: SharpnessReward) -> None:
        self.name = reward_name(config)

    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score; the prompts are not read."""
        return [looks.sharpness(picture) for picture in batch.pictures()]
