"""JPEG size: compressibility and incompressibility of DDPO (arXiv 2305.13301), without any model."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from verst.config.rewards import JpegSizeReward, reward_name
from verst.rewards.base import RewardBatch


class JpegSize:
    """Size of a picture as JPEG in kB (1000 bytes).

    `larger` gives +kB in [0, H * W * 3 / 1000], `smaller` gives -kB in [-H * W * 3 / 1000, 0]: the bound is the size of the
    raw pixels, which headers of a tiny picture could exceed.
    """

    def __init__(self, config: JpegSizeReward) -> None:
        self.name = reward_name(config)
        self._quality = config.quality
        self._sign = 1.0 if config.direction == "larger" else -1.0

    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score; the prompts are not read."""
        return [self._sign * self._size_kb(picture) for picture in batch.pictures()]

    def _size_kb(self, picture: np.ndarray) -> float:
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "JPEG", quality=self._quality)
        return min(buffer.tell(), picture.nbytes) / 1000
