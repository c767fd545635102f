"""Sizes and lengths that files are brought to, so that a batch is of one shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from verst.data.media import Probe, frames_at
from verst.errors import DataError


@dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    height: int
    width: int
    num_frames: int = 1
    fps: float | None = None
    """None for pictures."""

    def __str__(self) -> str:
        return f"{self.height}x{self.width}x{self.num_frames}"


def nearest_bucket(found: Probe, buckets: Sequence[Bucket], *, max_upscale: float) -> Bucket:
    """The longest that the clip fills; of these the nearest in shape, then in area, without too much enlarging.

    Raises DataError, saying what is too small or too short.
    """
    long_enough = [b for b in buckets if frames_at(found, b.fps) >= b.num_frames]
    if not long_enough:
        shortest = min(b.num_frames for b in buckets)
        raise DataError(f"is too short: {frames_at(found, buckets[0].fps)} frames, the shortest bucket has {shortest}")
    longest = max(b.num_frames for b in long_enough)
    fitting = [b for b in long_enough if b.num_frames == longest and _upscale(found, b) <= max_upscale + 1e-9]
    if not fitting:
        least = min(_upscale(found, b) for b in long_enough)
        raise DataError(
            f"is too small: {found.height}x{found.width} must be enlarged {least:.2f} times, "
            f"data.buckets.max_upscale = {max_upscale:g}"
        )
    return min(fitting, key=lambda b: (round(_ratio_distance(found, b), 6), _area_distance(found, b), b))


def _upscale(found: Probe, bucket: Bucket) -> float:
    return max(bucket.height / found.height, bucket.width / found.width)


def _ratio_distance(found: Probe, bucket: Bucket) -> float:
    return abs(math.log(found.width / found.height) - math.log(bucket.width / bucket.height))


def _area_distance(found: Probe, bucket: Bucket) -> float:
    return abs(math.log(found.width * found.height) - math.log(bucket.width * bucket.height))


def fit(frames: Tensor, *, height: int, width: int) -> Tensor:
    """uint8 [F, h, w, 3] -> [F, height, width, 3]: scaled until it covers the size, then the middle of it."""
    if tuple(frames.shape[1:3]) == (height, width):
        return frames
    scale = max(height / frames.shape[1], width / frames.shape[2])
    # Rounding may fall one pixel short of the size.
    rows, columns = max(height, round(frames.shape[1] * scale)), max(width, round(frames.shape[2] * scale))
    top, left = (rows - height) // 2, (columns - width) // 2
    out = torch.empty((len(frames), height, width, 3), dtype=torch.uint8)
    for index, frame in enumerate(frames):
        picture = Image.fromarray(frame.numpy()).resize((columns, rows), Image.Resampling.LANCZOS)
        cropped = picture.crop((left, top, left + width, top + height))
        out[index] = torch.frombuffer(bytearray(cropped.tobytes()), dtype=torch.uint8).view(height, width, 3)
    return out
