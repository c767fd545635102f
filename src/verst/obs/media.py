"""Files of one sample that any browser shows: PNG or WebP for a picture, WebM (VP9, Opus) for a clip and its sound."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

from verst.obs.images import save_png

_LOSSLESS_PIXELS = 256 * 256
"""Larger pictures are written as WebP at high quality: a run keeps thousands of them."""
_WEBP_QUALITY = 92
_DEFAULT_FPS = 8.0
_OPUS_HZ = 48_000


def save_picture(folder: Path, stem: str, picture: np.ndarray) -> str:
    """Write uint8 [H, W, 3]; the name of the file."""
    height, width, _ = picture.shape
    if height * width <= _LOSSLESS_PIXELS:
        return save_png(folder / f"{stem}.png", picture).name
    path = folder / f"{stem}.webp"
    Image.fromarray(picture).save(path, "WEBP", quality=_WEBP_QUALITY)
    return path.name


def save_media(
    folder: Path, stem: str, frames: np.ndarray, *, fps: float | None, audio: np.ndarray | None, sample_rate: int | None
) -> Path:
    """To keep: a single frame without loss as PNG, a clip as `save_clip` writes it. The file."""
    if len(frames) == 1 and audio is None:
        return save_png(folder / f"{stem}.png", frames[0])
    return folder / save_clip(folder, stem, frames, fps=fps, audio=audio, sample_rate=sample_rate)


def save_clip(
    folder: Path,
    stem: str,
    frames: np.ndarray,
    *,
    fps: float | None,
    audio: np.ndarray | None = None,
    sample_rate: int | None = None,
) -> str:
    """Write uint8 [F, H, W, 3] and fp32 [channels, n] in [-1, 1]; the name of the file.

    Sound of more than two channels keeps the first two.
    """
    import av

    path = folder / f"{stem}.webm"
    with av.open(str(path), "w", format="webm") as container:
        video = container.add_stream("libvpx-vp9", rate=Fraction(fps or _DEFAULT_FPS).limit_denominator(1001))
        video.height, video.width = frames.shape[1:3]
        video.pix_fmt = "yuv420p"
        video.options = {"deadline": "realtime", "cpu-used": "8", "crf": "24", "b": "0", "threads": "1"}
        sound = None
        if audio is not None:
            layout = "mono" if len(audio) == 1 else "stereo"
            sound = container.add_stream("libopus", rate=_OPUS_HZ, layout=layout)
        for frame in frames:
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(video.encode(None))
        if sound is not None and audio is not None:
            resampler = av.AudioResampler(format="flt", layout=sound.layout.name, rate=_OPUS_HZ)
            samples = np.ascontiguousarray(audio[:2], dtype=np.float32)
            whole = av.AudioFrame.from_ndarray(samples, format="fltp", layout=sound.layout.name)
            whole.sample_rate = sample_rate or _OPUS_HZ
            for part in (whole, None):
                for resampled in resampler.resample(part):
                    container.mux(sound.encode(resampled))
            container.mux(sound.encode(None))
    return path.name
