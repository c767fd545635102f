"""How unlike the others of its group a sample is: a reward against collapse, without a model."""

from __future__ import annotations

from verst.config.rewards import DiversityReward, reward_name
from verst.rewards import looks
from verst.rewards.base import RewardBatch


class Diversity:
    """Mean absolute difference of a sample's thumbnail from the others' of its group, in [0, 1]; the batch is one group.

    Its mean over the group is the mean over all pairs. Of a clip the middle frame is compared.
    """

    def __init__(self, config: DiversityReward) -> None:
        self.name = reward_name(config)

    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score; the prompts are not read."""
        return looks.to_others([looks.middle_frame(clip) for clip in batch.media.cpu().numpy()])
