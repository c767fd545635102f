"""Condition images of a request: files on the engine's machine, read once and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from verst.errors import RequestError
from verst.families import Family
from verst.families.base import ANY_IMAGES, SOME_IMAGES


@dataclass(frozen=True, kw_only=True, eq=False)
class ConditionImages:
    """The pictures of one request, in the order in which it names them."""

    pixels: tuple[Tensor, ...] = ()
    """uint8 [H, W, 3] each, RGB."""
    digest: str = ""
    """SHA-256 over their sizes and pixels; "" for no picture."""

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each."""
        return tuple((image.shape[0], image.shape[1]) for image in self.pixels)


def load_images(paths: Sequence[str] | None) -> ConditionImages:
    """Turned upright and made RGB, as diffusers' `load_image` does it. Raises RequestError, naming the file."""
    if not paths:
        return ConditionImages()
    pixels = tuple(_load(Path(path)) for path in paths)
    digest = hashlib.sha256()
    for image in pixels:
        digest.update(repr(tuple(image.shape)).encode())
        digest.update(image.numpy().tobytes())
    return ConditionImages(pixels=pixels, digest=digest.hexdigest())


def check_number(family: Family, number: int) -> None:
    """Raises RequestError when the family does not take as many condition images."""
    wanted = family.num_images
    if number == wanted or wanted == ANY_IMAGES or (wanted == SOME_IMAGES and number > 0):
        return
    if wanted == 0:
        raise RequestError(f"image_path names {number} files, but {family.name} makes media from text alone")
    needed = "at least one" if wanted == SOME_IMAGES else str(wanted)
    raise RequestError(f"image_path names {number or 'no'} files, but {family.name} needs {needed}")


def _load(path: Path) -> Tensor:
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        raise RequestError(f"image_path: {path} does not exist on the engine's machine") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RequestError(f"image_path: {path} cannot be read as a picture: {error}") from None
    return torch.from_numpy(np.array(upright))
