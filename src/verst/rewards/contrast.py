"""Root-mean-square contrast (Peli 1990): no model, for tests and as a watched reward."""

from __future__ import annotations

from verst.config.rewards import ContrastReward, reward_name
from verst.rewards import looks
from verst.rewards.base import RewardBatch


class Contrast:
    """Twice the standard deviation of luma over the pixels, in [0, 1]: 0 is flat, 1 is half black, half white."""

    def __init__(self, config: ContrastReward) -> None:
        self.name = reward_name(config)

    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score; the prompts are not read."""
        return [2 * float(looks.luma(picture).std()) for picture in batch.pictures()]
