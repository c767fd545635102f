"""Files to tensors. What a file is is seen from its bytes, not only from its name; every failure is a DataError."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from verst.data.items import IMAGES, VIDEOS, FileRef
from verst.errors import DataError

_SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""
_ORIENTATION = 274
"""The EXIF tag."""
_SOUND_SLACK_S = 0.1
"""Seconds of sound that may be missing at the end: encoders cut whole blocks."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the header says."""

    height: int
    width: int
    num_frames: int = 1
    fps: float | None = None
    """None for a picture."""
    has_sound: bool = False


@dataclass(frozen=True, kw_only=True)
class Window:
    """A stretch of a clip: `num_frames` at `fps`, from `start_s` on."""

    num_frames: int
    fps: float
    start_s: float


def probe(ref: FileRef) -> Probe:
    """Size and length without decoding. Raises DataError."""
    if ref.suffix in IMAGES:
        with ref.open() as file, _picture_errors(), Image.open(file) as image:
            width, height = image.size
            # A PNG decodes all of itself to look for EXIF behind the picture, where hardly any writer puts it.
            exif = {} if image.format == "PNG" and "exif" not in image.info else image.getexif()
            if exif.get(_ORIENTATION) in _SIDEWAYS:
                width, height = height, width
            return Probe(height=height, width=width)
    if ref.suffix not in VIDEOS:
        raise DataError(
            f"is no picture or clip: {ref.suffix or 'no suffix'} is not one of {', '.join(IMAGES + VIDEOS)}"
        )
    with ref.open() as file, _clip_errors(), av.open(file, mode="r") as container:
        stream = _video_stream(container)
        num_frames, fps = _length(container, stream)
        sound = bool(container.streams.audio)
        return Probe(height=stream.height, width=stream.width, num_frames=num_frames, fps=fps, has_sound=sound)


def window_of(found: Probe, *, num_frames: int, fps: float) -> Window:
    """The middle of a clip that is long enough."""
    length_s = found.num_frames / (found.fps or fps)
    return Window(num_frames=num_frames, fps=fps, start_s=max(0.0, (length_s - num_frames / fps) / 2))


def frames_at(found: Probe, fps: float | None) -> int:
    """Frames that a clip has at another rate."""
    if found.fps is None or fps is None:
        return found.num_frames
    return max(1, math.floor(found.num_frames * fps / found.fps + 1e-6))


def load_picture(ref: FileRef) -> Tensor:
    """uint8 [1, H, W, 3], upright; what is transparent becomes white. Raises DataError."""
    with ref.open() as file, _picture_errors(), Image.open(file) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16"):
            upright = Image.fromarray((np.asarray(upright) // 257).astype(np.uint8))
        if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
            upright = upright.convert("RGBA")
            white = Image.new("RGBA", upright.size, (255, 255, 255, 255))
            upright = Image.alpha_composite(white, upright)
        return torch.from_numpy(np.array(upright.convert("RGB"))).unsqueeze(0)


def load_clip(ref: FileRef, window: Window) -> Tensor:
    """uint8 [F, H, W, 3]: the nearest frame of the file for each frame of the window. Raises DataError."""
    with ref.open() as file, _clip_errors(), av.open(file, mode="r") as container:
        stream = _video_stream(container)
        num_frames, fps = _length(container, stream)
        times = [window.start_s + k / window.fps for k in range(window.num_frames)]
        wanted = [min(num_frames - 1, math.floor(t * fps + 1e-6)) for t in times]
        kept: dict[int, Tensor] = {}
        for index, frame in enumerate(container.decode(stream)):
            if index in wanted:
                kept[index] = torch.from_numpy(frame.to_ndarray(format="rgb24"))
            if index == wanted[-1]:
                break
        missing = [index for index in wanted if index not in kept]
        if missing:
            raise DataError(f"its header says {num_frames} frames, and frame {missing[0]} cannot be decoded")
        return torch.stack([kept[index] for index in wanted])


def load_sound(ref: FileRef, *, start_s: float, seconds: float, sample_rate: int, channels: int) -> Tensor:
    """fp32 [channels, n] of the stretch, brought to `sample_rate`. Raises DataError for NaN and for a length mismatch."""
    pieces = []
    with ref.open() as file, _clip_errors(), av.open(file, mode="r") as container:
        if not container.streams.audio:
            raise DataError("has no sound")
        stream = container.streams.audio[0]
        # Not mono to stereo: ffmpeg would make it quieter by 3 dB.
        layout = stream.layout.name if stream.layout.nb_channels <= 2 else "stereo"
        resampler = av.AudioResampler(format="fltp", layout=layout, rate=sample_rate)
        for frame in container.decode(stream):
            pieces += [part.to_ndarray() for part in resampler.resample(frame)]
        pieces += [part.to_ndarray() for part in resampler.resample(None)]
    if not pieces:
        raise DataError("its sound has no samples")
    sound = torch.from_numpy(np.concatenate(pieces, axis=1)).float()
    if not sound.isfinite().all():
        raise DataError("its sound has samples that are NaN or infinite")
    sound = sound.mean(dim=0, keepdim=True) if channels == 1 else sound.expand(channels, -1)
    first, count = round(start_s * sample_rate), round(seconds * sample_rate)
    missing_s = (first + count - sound.shape[1]) / sample_rate
    if missing_s > _SOUND_SLACK_S:
        raise DataError(
            f"its sound is {sound.shape[1] / sample_rate:.2f} s long, and its pictures need {start_s + seconds:.2f} s"
        )
    part = sound[:, first : first + count]
    return torch.nn.functional.pad(part, (0, count - part.shape[1]))


def _video_stream(container: Any) -> Any:
    if not container.streams.video:
        raise DataError("has no pictures: it is a container without a video stream")
    return container.streams.video[0]


def _length(container: Any, stream: Any) -> tuple[int, float]:
    """Frames and frames a second, as the header says."""
    rate = stream.average_rate or stream.guessed_rate
    if not rate:
        raise DataError("does not say how many frames a second it has")
    fps = float(rate)
    frames = stream.frames
    if not frames and container.duration:
        frames = round(container.duration / av.time_base * fps)
    if not frames:
        raise DataError("has no frames")
    return int(frames), fps


@contextlib.contextmanager
def _picture_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot be read as a picture: {error}") from None


@contextlib.contextmanager
def _clip_errors() -> Iterator[None]:
    try:
        yield
    except av.FFmpegError as error:
        raise DataError(f"cannot be read as a clip: {error.strerror or error}") from None
