"""The log-mel spectrogram that LTX-2's autoencoder of sound was trained on."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

_WINDOW = 1024
"""Samples of a frame; the released models' own, which diffusers' config does not state."""
_FLOOR = 1e-5


def log_mel(audio: Tensor, *, sample_rate: int, hop: int, bins: int) -> Tensor:
    """fp32 [B, channels, n] -> [B, channels, 1 + n // hop, bins]: log of the magnitudes on Slaney's mel scale.

    Hann frames centred on their sample with reflection at the edges, filters of unit area from 0 to half the sample
    rate, magnitudes (not powers) floored at 1e-5: as the training code of LTX-2 has it.
    """
    rows = audio.flatten(0, 1)
    # Reflection needs more than half a frame of sound.
    rows = torch.nn.functional.pad(rows, (0, max(0, _WINDOW // 2 + 1 - rows.shape[1])))
    spectrum = torch.stft(
        rows, _WINDOW, hop_length=hop, window=torch.hann_window(_WINDOW, device=rows.device), center=True,
        pad_mode="reflect", return_complex=True,
    ).abs()  # fmt: skip
    mel = _filters(sample_rate, bins).to(rows.device).T @ spectrum
    return mel.clamp(min=_FLOOR).log().transpose(1, 2).unflatten(0, audio.shape[:2])


@functools.lru_cache(maxsize=4)
def _filters(sample_rate: int, bins: int) -> Tensor:
    """[1 + _WINDOW / 2, bins] fp32"""
    bank = mel_filter_bank(1 + _WINDOW // 2, bins, 0.0, sample_rate / 2, sample_rate, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(bank).float()
