"""Do sound and picture happen at the same time? Correlation of sound onsets with visual motion over time shifts; no model.

There is no learned synchronisation model in the transformers layout. This is a signal measure in the spirit of audio-visual
event alignment: it hears a clap, a step, a bounce, and knows nothing of lips, music or what makes a sound.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from verst.config.rewards import AvSyncReward, reward_name
from verst.errors import RewardError
from verst.rewards.base import RewardBatch
from verst.rewards.looks import REC_601
from verst.rewards.sound import mono

_FLOOR = 1e-4
"""RMS below which sound is silence (-80 dB of full scale)."""
_STILL = 0.1
"""Standard deviation of motion, in levels of 255, below which a clip stands still."""


class AvSync:
    """Peak correlation at shifts within `tolerance_s`, minus the peak at larger shifts up to `max_shift_s`; in [-2, 2].

    Above 0: the best alignment is the one that is there. Below 0: another shift fits better. NaN: nothing to hear or see.
    """

    def __init__(self, config: AvSyncReward) -> None:
        self.name = reward_name(config)
        self._tolerance_s = config.tolerance_s
        self._max_shift_s = config.max_shift_s

    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score; the prompts are not read. Raises RewardError for pictures, or a batch without sound or fps."""
        wave, rate = mono(batch, self.name)
        num_frames = batch.media.shape[1]
        if batch.fps is None:
            raise RewardError("reward av_sync needs the frames a second of the clips")
        near, far = round(self._tolerance_s * batch.fps), round(self._max_shift_s * batch.fps)
        if num_frames - 1 < far + 8 or far <= near:
            raise RewardError(
                f"reward av_sync: {num_frames} frames at {batch.fps:g} a second are too few for shifts up to "
                f"{self._max_shift_s:g} s beside {self._tolerance_s:g} s: needed are {far + 9} frames and shifts of more "
                "than one frame; set max_shift_s or make longer clips"
            )
        motion, onsets = motion_of(batch.media), onsets_of(wave.to(batch.media.device), num_frames, rate / batch.fps)
        return [sync(m, o, near, far) for m, o in zip(motion, onsets, strict=True)]


def motion_of(media: Tensor) -> Tensor:
    """fp64 [B, F - 1]: mean absolute change of Rec. 601 luma from frame to frame, in levels of 255."""
    weights = torch.tensor(REC_601, dtype=torch.float32, device=media.device)
    luma = torch.stack([(clip.float() @ weights).flatten(1) for clip in media])
    return luma.diff(dim=1).abs().double().mean(dim=2)


def onsets_of(wave: Tensor, num_frames: int, samples_per_frame: float) -> Tensor:
    """fp64 [B, F - 1]: rise of the log RMS of sound from the span of one frame to the next, falls as 0; [B, n]."""
    edges = [round(i * samples_per_frame) for i in range(num_frames + 1)]
    levels = []
    for start, end in itertools.pairwise(edges):
        # Sound that ends before the picture is silent there.
        span = wave[:, start:end].double()
        levels.append(span.square().sum(dim=1) / max(1, end - start))
    rms = torch.stack(levels, dim=1).sqrt().clamp(min=_FLOOR)
    return rms.log().diff(dim=1).clamp(min=0)


def sync(motion: Tensor, onsets: Tensor, near: int, far: int) -> float:
    """max over |k| <= near of rho(k) minus max over near < |k| <= far of rho(k); rho: Pearson of motion[t] and onsets[t + k].

    NaN where either does not vary: silence, or a still clip.
    """
    if float(motion.std()) < _STILL or float(onsets.std()) == 0:
        return math.nan
    rho = {k: _pearson(motion, onsets, k) for k in range(-far, far + 1)}
    return max(rho[k] for k in rho if abs(k) <= near) - max(rho[k] for k in rho if abs(k) > near)


def _pearson(a: Tensor, b: Tensor, shift: int) -> float:
    """Of a[t] and b[t + shift] where both are there; 0 where one of them is constant."""
    left = a[max(0, -shift) : len(a) - max(0, shift)]
    right = b[max(0, shift) : len(b) - max(0, -shift)]
    left, right = left - left.mean(), right - right.mean()
    norm = float(left.norm() * right.norm())
    return float(left @ right) / norm if norm > 0 else 0.0
