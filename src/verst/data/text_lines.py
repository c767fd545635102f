"""Captions drawn as pictures, on the fly: one line of black text on white, in several fonts, sizes and places."""

from __future__ import annotations

import functools
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from verst.errors import ConfigError, PromptError

_MARGIN = 2
"""Pixels between the text and the edge at its largest size."""
_SMALLEST = 0.8
"""Smallest size, as a share of the largest that fits."""


class TextLines:
    """Captions and fonts; a batch depends on its seed alone."""

    def __init__(self, captions: Sequence[str], fonts: Sequence[str], *, height: int, width: int) -> None:
        """height, width: pixels. Raises ConfigError for a font that is not there."""
        self._captions = list(captions)
        self._fonts = [str(font) for font in fonts]
        self._height, self._width = height, width
        for font in self._fonts:
            _load_font(font, 8)

    def batch(self, size: int, *, seed: int) -> tuple[list[str], Tensor]:
        """`size` random captions and their pictures, uint8 [size, 1, height, width, 3]."""
        rng = random.Random(seed)
        captions = [rng.choice(self._captions) for _ in range(size)]
        pictures = np.stack([self.draw(caption, rng) for caption in captions])
        return captions, torch.from_numpy(pictures).unsqueeze(1).unsqueeze(-1).expand(-1, -1, -1, -1, 3).contiguous()

    def draw(self, text: str, rng: random.Random) -> np.ndarray:
        """uint8 [height, width] grey levels: `text` in a random font, size and place, inside the picture."""
        font_name = rng.choice(self._fonts)
        largest = self._largest_size(font_name, text)
        font = _load_font(font_name, max(6, round(largest * rng.uniform(_SMALLEST, 1.0))))
        left, top, right, bottom = font.getbbox(text)
        x = rng.uniform(0, self._width - (right - left)) if right - left < self._width else 0
        y = rng.uniform(0, self._height - (bottom - top)) if bottom - top < self._height else 0
        # Half-way towards the centre: jitter, but text that seldom touches an edge.
        x, y = (x + (self._width - (right - left)) / 2) / 2, (y + (self._height - (bottom - top)) / 2) / 2
        image = Image.new("L", (self._width, self._height), 255)
        ImageDraw.Draw(image).text((x - left, y - top), text, fill=0, font=font)
        return np.asarray(image)

    def _largest_size(self, font_name: str, text: str) -> float:
        """Pixels: the font size at which the text fills the picture less its margin, in width or in height."""
        reference = 64
        left, top, right, bottom = _load_font(font_name, reference).getbbox(text)
        if right <= left or bottom <= top:
            raise PromptError(f"caption {text!r} draws nothing in {font_name}")
        fit = min(
            (self._width - 2 * _MARGIN) / (right - left),
            (self._height - 2 * _MARGIN) / (bottom - top),
        )
        return reference * fit


@functools.lru_cache(maxsize=256)
def _load_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    bundled = _bundled_fonts() / name
    try:
        return ImageFont.truetype(str(bundled) if bundled.is_file() else name, size)
    except OSError:
        raise ConfigError(
            f"data.fonts: no TrueType font {name!r} was found among {_bundled_fonts()} and the system's fonts; "
            "give the path of a .ttf file, or install it"
        ) from None


def _bundled_fonts() -> Path:
    """The DejaVu fonts inside matplotlib, which is not imported: the same pictures on any machine."""
    spec = importlib.util.find_spec("matplotlib")
    assert spec is not None  # a dependency of verst
    assert spec.origin is not None
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
