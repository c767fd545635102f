"""What a reward is: samples and their prompts in, one number a sample out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from verst.errors import RewardError


class Reward(Protocol):
    """Scores samples, one call at a time; a pool gives each worker an instance of its own."""

    name: str
    """Its name in metrics."""

    def score(self, media: Tensor, prompts: Sequence[str]) -> list[float]:
        """One number a sample, larger is better; NaN for a sample it cannot judge.

        media: uint8 [B, F, H, W, 3] RGB, F = 1 for an image; prompts: B. Raises RewardError where they are not that.
        """


def frames_of(media: Tensor, prompts: Sequence[str]) -> np.ndarray:
    """`media` as a numpy array uint8 [B, F, H, W, 3], after the checks that every reward needs. Raises RewardError."""
    if media.dtype != torch.uint8:
        raise RewardError(f"rewards take media of dtype uint8 in 0..255, got {media.dtype}")
    if media.ndim != 5 or media.shape[-1] != 3 or 0 in media.shape:
        raise RewardError(f"rewards take media of shape [B, F, H, W, 3], got {list(media.shape)}")
    if len(media) != len(prompts):
        raise RewardError(f"rewards take one prompt a sample, got {len(prompts)} prompts for {len(media)} samples")
    array: np.ndarray = media.cpu().numpy()
    return array


def spread(num_frames: int, at_most: int) -> list[int]:
    """Indices of at most `at_most` frames, evenly spaced over the clip; the middle frame where one is wanted."""
    count = min(num_frames, at_most)
    return [(2 * i + 1) * num_frames // (2 * count) for i in range(count)]
