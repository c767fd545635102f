"""Small pictures, clips and sounds, written with the libraries that people write them with."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image


def write_picture(path: Path, *, height: int = 40, width: int = 40, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def write_clip(
    path: Path,
    *,
    frames: int = 12,
    fps: int = 24,
    height: int = 32,
    width: int = 32,
    sound_s: float | None = None,
    noise: bool = False,
) -> Path:
    """Frame i is of grey level 15 i (modulo 256), or noise of many bytes; sound: a stereo tone in AAC."""
    rng = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(path, "w") as container:
        video: Any = container.add_stream("mpeg4", rate=fps)
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        audio: Any = None
        if sound_s is not None:
            audio = container.add_stream("aac", rate=16000)
            audio.layout = "stereo"
        for index in range(frames):
            grey = np.full((height, width, 3), 15 * index % 256, np.uint8)
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 256, grey.shape, dtype=np.uint8) if noise else grey)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if audio is not None and sound_s is not None:
            count = round(16000 * sound_s)
            tone = np.sin(np.arange(count) * 0.1).astype(np.float32) * 0.3
            part = av.AudioFrame.from_ndarray(np.stack([tone, tone]), format="fltp", layout="stereo")
            part.sample_rate = 16000
            container.mux(audio.encode(part))
            container.mux(audio.encode(None))
    return path


def write_sound(path: Path, *, seconds: float, rate: int = 16000) -> Path:
    """A mono tone, 16 bits."""
    tone = (np.sin(np.arange(round(rate * seconds)) * 0.1) * 8000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(tone.tobytes())
    return path


def write_float_sound(path: Path, samples: np.ndarray, *, rate: int = 16000) -> Path:
    """A .wav of fp32 samples, as the NaN of a broken recorder comes in."""
    data = samples.astype("<f4").tobytes()
    head = b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
    kind = (3).to_bytes(2, "little") + (1).to_bytes(2, "little") + rate.to_bytes(4, "little")
    kind += (4 * rate).to_bytes(4, "little") + (4).to_bytes(2, "little") + (32).to_bytes(2, "little")
    path.write_bytes(head + kind + b"data" + len(data).to_bytes(4, "little") + data)
    return path
