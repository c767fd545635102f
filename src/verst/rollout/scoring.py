"""From a microgroup to what rewards see of it."""

from __future__ import annotations

import torch

from verst.errors import EngineError
from verst.rewards.base import RewardBatch
from verst.rollout.plan import MicrogroupTask
from verst.types import Microgroup


def reward_batch(task: MicrogroupTask, microgroup: Microgroup) -> RewardBatch:
    """The samples of one microgroup. Raises RewardError for media that no reward takes, EngineError for mixed ones."""
    samples = microgroup.samples
    first = samples[0]
    for sample in samples[1:]:
        if (sample.fps, sample.sample_rate, sample.media.shape) != (first.fps, first.sample_rate, first.media.shape):
            raise EngineError("the samples of one request came back with unlike sizes or rates")
    audio = [sample.audio for sample in samples if sample.audio is not None]
    return RewardBatch(
        media=torch.stack([sample.media for sample in samples]),
        prompts=task.prompts,
        metadata=task.metadata,
        fps=first.fps,
        audio=torch.stack(audio) if audio else None,
        sample_rate=first.sample_rate,
    )
