"""What rewards need of sound: one channel, another rate, the samples of a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from verst.errors import RewardError
from verst.rewards.base import RewardBatch

_WIDTH = 16
"""Zero crossings of the filter on each side of its centre."""
_ROLLOFF = 0.95
"""Cut-off of the filter as a share of the lower rate's half."""


def mono(batch: RewardBatch, reward: str) -> tuple[Tensor, int]:
    """fp32 [B, n], the mean of the channels, and samples a second. Raises RewardError for a batch without sound."""
    if batch.audio is None or batch.sample_rate is None:
        raise RewardError(f"reward {reward} scores sound, and this model family gives none")
    return batch.audio.mean(dim=1), batch.sample_rate


def resample(wave: Tensor, old_rate: int, new_rate: int) -> Tensor:
    """fp32 [B, ceil(n * new / old)] of [B, n]: band-limited interpolation with a Hann-windowed sinc.

    Both rates over their greatest common divisor give `new` phases of one filter, run as one strided convolution.
    """
    if old_rate == new_rate:
        return wave
    divisor = math.gcd(old_rate, new_rate)
    old, new = old_rate // divisor, new_rate // divisor
    cutoff = _ROLLOFF * min(old, new)
    reach = math.ceil(_WIDTH * old / cutoff)
    # float64: the phases differ by a fraction of a sample, and a kernel is made in no time.
    taps = torch.arange(-reach, reach + old, dtype=torch.float64) / old
    phases = -torch.arange(new, dtype=torch.float64)[:, None] / new + taps
    x = (phases * cutoff).clamp(-_WIDTH, _WIDTH)
    kernel = torch.sinc(x) * torch.cos(x * math.pi / _WIDTH / 2) ** 2 * cutoff / old
    padded = pad(wave[:, None], (reach, reach + old))
    out = conv1d(padded, kernel[:, None].to(padded), stride=old)
    length = math.ceil(wave.shape[-1] * new / old)
    return out.transpose(1, 2).reshape(len(wave), -1)[:, :length]
