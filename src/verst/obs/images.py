"""Pictures for people: grids with captions, and before / after strips, as PNG."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_FONT_PX = 13
_GAP = 6
_MIN_SIDE = 128
"""Smaller pictures are enlarged by a whole factor until their longer side has this many pixels."""
_INK, _PAPER = (40, 40, 40), (255, 255, 255)


def grid(images: np.ndarray, captions: Sequence[str] | None = None, *, columns: int | None = None) -> np.ndarray:
    """One picture uint8 [H', W', 3] of uint8 [N, H, W, 3], row by row, each with its caption below.

    columns: unset = as many as rows, or one more. Raises ValueError for other shapes, N = 0, or other than N captions.
    """
    _check(images, captions)
    images = _enlarge(images)
    num, height, width, _ = images.shape
    columns = min(num, columns or math.ceil(math.sqrt(num)))
    rows = math.ceil(num / columns)
    caption_px = 0 if captions is None else _FONT_PX + 4
    size = (columns * (width + _GAP) + _GAP, rows * (height + caption_px + _GAP) + _GAP)
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    for i in range(num):
        x = _GAP + i % columns * (width + _GAP)
        y = _GAP + i // columns * (height + caption_px + _GAP)
        sheet.paste(Image.fromarray(images[i]), (x, y))
        if captions is not None:
            draw.text((x, y + height + 1), _fit(captions[i], width), fill=_INK, font=_font())
    return np.asarray(sheet)


def padded(images: Sequence[np.ndarray]) -> np.ndarray:
    """uint8 [H, W, 3] each, of unlike sizes -> [N, largest H, largest W, 3]: white on the right and below."""
    height, width = (max(image.shape[side] for image in images) for side in (0, 1))
    sheet = np.full((len(images), height, width, 3), 255, dtype=np.uint8)
    for place, image in zip(sheet, images, strict=True):
        place[: image.shape[0], : image.shape[1]] = image
    return sheet


def before_after(before: np.ndarray, after: np.ndarray, captions: Sequence[str] | None = None) -> np.ndarray:
    """Two labelled rows, the same samples above each other; before and after: uint8 [N, H, W, 3] of one shape."""
    if before.shape != after.shape:
        raise ValueError(f"before {before.shape} and after {after.shape} must have one shape")
    above = grid(before, columns=len(before))
    below = grid(after, captions, columns=len(after))
    label_px = 8 + max(math.ceil(_font().getlength(word)) for word in ("before", "after"))
    sheet = Image.new("RGB", (label_px + above.shape[1], above.shape[0] + below.shape[0]), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for word, strip, y in (("before", above, 0), ("after", below, above.shape[0])):
        sheet.paste(Image.fromarray(strip), (label_px, y))
        draw.text((_GAP, y + above.shape[0] / 2), word, fill=_INK, font=_font(), anchor="lm")
    return np.asarray(sheet)


def save_png(path: Path, picture: np.ndarray) -> Path:
    """Write uint8 [H, W, 3]; a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    Image.fromarray(picture).save(partial, "PNG")
    os.replace(partial, path)
    return path


def load_picture(path: Path) -> np.ndarray:
    """uint8 [H, W, 3] of a PNG or WebP file."""
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def _check(images: np.ndarray, captions: Sequence[str] | None) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or 0 in images.shape:
        raise ValueError(f"pictures must be uint8 [N, H, W, 3], got {images.dtype} {list(images.shape)}")
    if captions is not None and len(captions) != len(images):
        raise ValueError(f"{len(captions)} captions for {len(images)} pictures")


def _enlarge(images: np.ndarray) -> np.ndarray:
    factor = max(1, math.ceil(_MIN_SIDE / max(images.shape[1:3])))
    return images.repeat(factor, axis=1).repeat(factor, axis=2)


def _font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(_FONT_PX)


def _fit(text: str, width: int) -> str:
    """One line, shortened to `width` pixels."""
    text, font = " ".join(text.split()), _font()
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
