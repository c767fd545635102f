"""What supervised training learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from verst.config.basis import NonNegativeInt, PositiveFloat, PositiveInt, Section


class TextLinesData(Section):
    type: Literal["text_lines"] = "text_lines"
    """Short strings rendered as images, made on the fly: digits of a fixed length, or words."""
    prompts: Path
    """Captions to draw, one a line; the held-out ones of [prompts] must not be among them."""
    fonts: tuple[str, ...] = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf")
    """TrueType files: by path, by name among those that matplotlib brings, or by a name that the system finds."""


class AutoencoderConfig(Section):
    steps: NonNegativeInt = 0
    """SFT of a model built from nothing: optimizer steps for the autoencoder first; 0 = leave it as it is."""
    batch_size: PositiveInt = 128
    lr: PositiveFloat = 2e-3
