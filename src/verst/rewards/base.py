"""What a reward is: a batch of samples in, one number a sample out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from verst.errors import RewardError

Score = float | RewardError
"""A sample's score, larger is better; NaN where the reward cannot judge it; an error where only this sample failed."""


@dataclass(frozen=True, kw_only=True)
class RewardBatch:
    """B samples as every reward gets them, whatever family made them. Made wrong it raises RewardError."""

    media: Tensor
    """uint8 [B, F, H, W, 3] RGB, F = 1 for an image; F = 0 where all rewards of the samples read latents."""
    prompts: tuple[str, ...]
    """B"""
    metadata: tuple[Mapping[str, Any], ...]
    """B: the other columns of each sample's prompt row; empty where there are none."""
    fps: float | None = None
    """Frames a second; None for an image."""
    audio: Tensor | None = None
    """fp32 [B, channels, n] in [-1, 1]; None from a family without sound."""
    sample_rate: int | None = None
    """Audio samples a second; given with audio."""
    latents: Mapping[str, Tensor] | None = None
    """stream -> fp32 [B, ...] final latents, where a reward of the samples reads them; see docs/rewards.md."""

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def plain(cls, media: Tensor, prompts: Sequence[str]) -> RewardBatch:
        """Media and prompts alone."""
        return cls(media=media, prompts=tuple(prompts), metadata=tuple({} for _ in prompts))

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, indices: Sequence[int]) -> RewardBatch:
        """These samples of the batch, in this order."""
        at = torch.tensor(indices, dtype=torch.int64)
        return RewardBatch(
            media=self.media[at],
            prompts=tuple(self.prompts[i] for i in indices),
            metadata=tuple(self.metadata[i] for i in indices),
            fps=self.fps,
            audio=None if self.audio is None else self.audio[at],
            sample_rate=self.sample_rate,
            latents=None if self.latents is None else {name: x[at] for name, x in self.latents.items()},
        )

    @classmethod
    def join(cls, batches: Sequence[RewardBatch]) -> RewardBatch:
        """All samples of batches of one kind, in order."""
        first = batches[0]
        return cls(
            media=torch.cat([batch.media for batch in batches]),
            prompts=tuple(prompt for batch in batches for prompt in batch.prompts),
            metadata=tuple(row for batch in batches for row in batch.metadata),
            fps=first.fps,
            audio=None if first.audio is None else torch.cat([b.audio for b in batches if b.audio is not None]),
            sample_rate=first.sample_rate,
            latents=None
            if first.latents is None
            else {name: torch.cat([b.latents[name] for b in batches if b.latents]) for name in first.latents},
        )

    def kind(self) -> tuple[Any, ...]:
        """Batches of equal kind can be joined."""
        audio = None if self.audio is None else tuple(self.audio.shape[1:])
        latents = {name: tuple(x.shape[1:]) for name, x in (self.latents or {}).items()}
        return (tuple(self.media.shape[1:]), self.fps, audio, self.sample_rate, tuple(sorted(latents.items())))

    def pictures(self) -> np.ndarray:
        """uint8 [B, H, W, 3] of a batch of images. Raises RewardError for clips: see `rewards.frames`."""
        if self.media.shape[1] != 1:
            raise RewardError(f"this reward takes pictures, got clips of {self.media.shape[1]} frames")
        array: np.ndarray = self.media[:, 0].cpu().numpy()
        return array


class Reward(Protocol):
    """Scores samples, one call at a time; a pool gives each worker an instance of its own."""

    name: str
    """Its name in metrics."""

    def score(self, batch: RewardBatch) -> Sequence[Score]:
        """One a sample, in order. Raises RewardError where nothing could be scored: the call is made again."""


def _check(batch: RewardBatch) -> None:
    media, count = batch.media, len(batch.prompts)
    if media.dtype != torch.uint8:
        raise RewardError(f"rewards take media of dtype uint8 in 0..255, got {media.dtype}")
    empty = 0 in (media.shape[2:] if batch.latents else media.shape)
    if media.ndim != 5 or media.shape[-1] != 3 or empty:
        raise RewardError(f"rewards take media of shape [B, F, H, W, 3], got {list(media.shape)}")
    if len(media) != count:
        raise RewardError(f"rewards take one prompt a sample, got {count} prompts for {len(media)} samples")
    if len(batch.metadata) != count:
        raise RewardError(f"rewards take one metadata a sample, got {len(batch.metadata)} for {count} samples")
    if batch.fps is not None and not batch.fps > 0:
        raise RewardError(f"rewards take fps above 0 or None, got {batch.fps}")
    if (batch.audio is None) != (batch.sample_rate is None):
        raise RewardError("rewards take audio and sample_rate together, or neither")
    if batch.audio is not None:
        _check_audio(batch.audio, count)
    for name, latents in (batch.latents or {}).items():
        if latents.ndim < 2 or len(latents) != count:
            raise RewardError(f"rewards take latents of {count} samples, got {list(latents.shape)} in stream {name}")


def _check_audio(audio: Tensor, count: int) -> None:
    if audio.dtype != torch.float32:
        raise RewardError(f"rewards take audio of dtype float32, got {audio.dtype}")
    if audio.ndim != 3 or 0 in audio.shape or len(audio) != count:
        raise RewardError(f"rewards take audio of shape [{count}, channels, n], got {list(audio.shape)}")
    peak = float(audio.abs().max())
    if not peak <= 1:  # NaN as well
        raise RewardError(f"rewards take audio in [-1, 1], got a value of magnitude {peak:g}")
