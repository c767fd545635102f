"""Cheap numbers of pictures alone, without a model: how unlike the samples of a group are, how bright, how sharp."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

THUMBNAIL = 16
"""Rows and columns in which samples are compared: composition and colour, no texture."""
REC_601 = np.array([0.299, 0.587, 0.114])
"""Weights of R, G and B in luma."""


def middle_frame(media: np.ndarray) -> np.ndarray:
    """uint8 [F, H, W, 3] -> [H, W, 3]: an image, or the frame in the middle of a clip."""
    frame: np.ndarray = media[len(media) // 2]
    return frame


def thumbnail(frame: np.ndarray, size: int = THUMBNAIL) -> np.ndarray:
    """uint8 [H, W, 3] -> fp64 [size, size, 3] in [0, 1]: the mean of each cell (cells differ by a pixel at most)."""
    sums = frame.astype(np.int64)
    for axis in (0, 1):
        edges = np.arange(size) * frame.shape[axis] // size
        sums = np.add.reduceat(sums, edges, axis=axis)
    rows, columns = (_cell_sizes(length, size) for length in frame.shape[:2])
    means: np.ndarray = sums / (rows[:, None, None] * columns[None, :, None]) / 255
    return means


def _cell_sizes(length: int, size: int) -> np.ndarray:
    edges = np.append(np.arange(size) * length // size, length)
    return np.maximum(1, np.diff(edges))  # fewer pixels than cells: some repeat their neighbour's pixel


def diversity(frames: Sequence[np.ndarray]) -> float:
    """Mean absolute difference of the thumbnails of two samples, over all pairs, in [0, 1].

    frames: uint8 [H, W, 3] each, at least two. 0 = all alike.
    """
    distances = to_others(frames)
    return sum(distances) / len(distances)


def to_others(frames: Sequence[np.ndarray]) -> list[float]:
    """Mean absolute difference of each sample's thumbnail from the others', in [0, 1].

    frames: uint8 [H, W, 3] each, at least two. Raises ValueError for fewer.
    """
    if len(frames) < 2:
        raise ValueError(f"the samples of a group are compared with one another; got {len(frames)}")
    small = np.stack([thumbnail(frame) for frame in frames])
    return [float(np.abs(small - one).mean(axis=(1, 2, 3)).sum()) / (len(small) - 1) for one in small]


def luma(frame: np.ndarray) -> np.ndarray:
    """uint8 [..., 3] -> fp64 [...] in [0, 1]: Rec. 601."""
    values: np.ndarray = frame @ REC_601 / 255
    return values


def sharpness(frame: np.ndarray) -> float:
    """Mean absolute luma difference of neighbouring pixels, down and across, in [0, 1]; 0 for a flat picture."""
    grey = luma(frame)
    steps = [np.abs(np.diff(grey, axis=axis)) for axis in (0, 1) if grey.shape[axis] > 1]
    return float(np.mean([step.mean() for step in steps])) if steps else 0.0
