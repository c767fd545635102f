"""JPEG size: compressibility and incompressibility of DDPO (arXiv 2305.13301), without any model."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from verst.config.sections import JpegSizeReward
from verst.rewards.base import frames_of


class JpegSize:
    """Size of a frame as JPEG in kB (1000 bytes), mean over frames.

    `larger` gives +kB in [0, H * W * 3 / 1000], `smaller` gives -kB in [-H * W * 3 / 1000, 0]: the bound is the size of the
    raw pixels, which headers of a tiny picture could exceed.
    """

    def __init__(self, config: JpegSizeReward) -> None:
        self.name: str = config.type
        self._quality = config.quality
        self._sign = 1.0 if config.direction == "larger" else -1.0

    def score(self, media: Tensor, prompts: Sequence[str]) -> list[float]:
        """See Reward.score; the prompts are not read."""
        clips = frames_of(media, prompts)
        return [self._sign * float(np.mean([self._size_kb(frame) for frame in clip])) for clip in clips]

    def _size_kb(self, frame: np.ndarray) -> float:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=self._quality)
        return min(buffer.tell(), frame.nbytes) / 1000
