"""CLIP score: does the image show what the prompt says (CLIPScore, arXiv 2104.08718, without its rescaling to w = 2.5)."""

from __future__ import annotations

from verst.config.rewards import ClipScoreReward, reward_name
from verst.rewards.base import RewardBatch
from verst.rewards.clip import Clip, cosines, needs
from verst.rewards.frozen import pictures, refuse


class ClipScore:
    """scale * cos(image, prompt), in [-scale, scale]; about 0.2 to 0.35 for a fitting pair of openai/clip-vit-large-patch14."""

    def __init__(self, config: ClipScoreReward) -> None:
        """Loads the model. Raises ConfigError."""
        self.name = reward_name(config)
        self._config = config
        self._scale = config.scale
        refuse(config, needs(config))
        self._clip = Clip(config.path, config)

    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score. Raises RewardError for a prompt that is too long."""
        images = self._clip.images(pictures(batch))
        return [self._scale * value for value in cosines(images, self._clip.prompts(self._config, batch.prompts))]
