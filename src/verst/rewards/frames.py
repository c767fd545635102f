"""Clips for rewards that judge pictures: which frames they see, and what becomes of their scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verst.config.rewards import FrameChoice, FramesConfig
from verst.errors import RewardError
from verst.rewards.base import Reward, RewardBatch, Score


class FrameWise:
    """An image reward as a reward of clips: its picture batch is every chosen frame of every sample.

    A clip of which one frame failed has failed; NaN of one frame is NaN of the clip.
    """

    def __init__(self, reward: Reward, config: FramesConfig) -> None:
        self.name = reward.name
        self._reward = reward
        self._config = config

    def score(self, batch: RewardBatch) -> Sequence[Score]:
        """See Reward.score."""
        chosen = chosen_frames(batch.media.shape[1], self._config)
        scores = list(self._reward.score(frame_batch(batch, chosen)))
        if len(scores) != len(batch) * len(chosen):
            raise RewardError(f"gave {len(scores)} scores for {len(batch) * len(chosen)} pictures")
        size = len(chosen)
        return [_reduced(scores[i * size : (i + 1) * size], self._config.reduce) for i in range(len(batch))]


def frame_batch(batch: RewardBatch, chosen: Sequence[int]) -> RewardBatch:
    """The chosen frames of B clips as B * len(chosen) pictures, clip by clip, each with its clip's prompt."""
    frames = batch.media[:, list(chosen)].flatten(0, 1)[:, None]
    return RewardBatch(
        media=frames,
        prompts=tuple(prompt for prompt in batch.prompts for _ in chosen),
        metadata=tuple(metadata for metadata in batch.metadata for _ in chosen),
    )


def chosen_frames(num_frames: int, config: FrameChoice) -> list[int]:
    """Indices of the frames that a policy takes of a clip, ascending."""
    if config.policy == "all":
        return list(range(num_frames))
    if config.policy == "uniform":
        return spread(num_frames, config.count)
    return {"first": [0], "middle": spread(num_frames, 1), "last": [num_frames - 1]}[config.policy]


def spread(num_frames: int, at_most: int) -> list[int]:
    """Indices of at most `at_most` frames, evenly spaced over the clip; the middle frame where one is wanted."""
    count = min(num_frames, at_most)
    return [(2 * i + 1) * num_frames // (2 * count) for i in range(count)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_REDUCE: dict[str, Callable[[Sequence[float]], float]] = {"mean": _mean, "min": min, "max": max}


def _reduced(scores: Sequence[Score], reduce: str) -> Score:
    values = []
    for score in scores:
        if isinstance(score, RewardError):
            return score
        values.append(float(score))
    # min and max of Python pass over a NaN that does not come first.
    return next((value for value in values if value != value), _REDUCE[reduce](values))
