"""PickScore v1 (arXiv 2305.01569): CLIP ViT-H/14 trained on people's choices between two images of one prompt."""

from __future__ import annotations

from verst.config.rewards import PickScoreReward, reward_name
from verst.rewards.base import RewardBatch
from verst.rewards.clip import Clip, cosines, needs
from verst.rewards.frozen import pictures, refuse

_TYPICAL = 26.0
"""By which Flow-GRPO (arXiv 2505.05470) divides: scores of good images come near 1."""


class PickScore:
    """exp(logit_scale) * cos(image, prompt), over 26 where `normalise`: about 0.7 to 0.95; else about 18 to 25."""

    def __init__(self, config: PickScoreReward) -> None:
        """Loads the model. Raises ConfigError."""
        self.name = reward_name(config)
        self._config = config
        refuse(config, needs(config))
        self._clip = Clip(config.path, config)
        self._factor = self._clip.logit_scale / (_TYPICAL if config.normalise else 1.0)

    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score. Raises RewardError for a prompt that is too long."""
        images = self._clip.images(pictures(batch))
        return [self._factor * value for value in cosines(images, self._clip.prompts(self._config, batch.prompts))]
