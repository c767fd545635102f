"""LAION's improved aesthetic predictor: how well people would rate the image, whatever the prompt (used by DDPO, arXiv 2305.13301)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from verst.config.rewards import AestheticReward, reward_name
from verst.rewards import clip
from verst.rewards.base import RewardBatch
from verst.rewards.clip import Clip
from verst.rewards.frozen import fill, frozen, lacking_file, pictures, rating_head, refuse, shape_of, state_of


class Aesthetic:
    """Linear regression of the CLIP ViT-L/14 unit vector to a rating of 1 to 10; over 10 where `normalise`.

    The head is linear, so nothing bounds it: published images get about 3 to 7.5.
    """

    def __init__(self, config: AestheticReward) -> None:
        """Loads CLIP from `path` and the regression from `head`. Raises ConfigError."""
        self.name = reward_name(config)
        self._factor = 0.1 if config.normalise else 1.0
        refuse(config, needs(config))
        self._clip = Clip(config.path, config)
        file = Path(config.head).expanduser()
        state = state_of(config, file)
        width = shape_of(state, "layers.0.weight", config, source=file)[1]
        self._head = nn.ModuleDict({"layers": rating_head(width)})
        fill(self._head, state, config, source=file)
        frozen(self._head, config)

    @torch.no_grad()
    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score; the prompts are not read."""
        ratings = self._head["layers"](self._clip.images(pictures(batch)))[:, 0]
        return [self._factor * float(rating) for rating in ratings]


def needs(config: AestheticReward) -> list[str]:
    """What the folder lacks, and the file of the regression."""
    return clip.needs(config) + lacking_file(config.head, key="head")
