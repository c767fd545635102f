"""Sizes of media that a model can make, refused with the nearest that fits."""

from __future__ import annotations

from verst.errors import RequestError
from verst.types import Geometry


def check_pixels(geometry: Geometry, *, multiple: int) -> None:
    """Raises RequestError for a side that is not a positive multiple of `multiple` pixels."""
    for side, pixels in (("height", geometry.height), ("width", geometry.width)):
        if pixels % multiple or pixels <= 0:
            nearest = max(multiple, round(pixels / multiple) * multiple)
            raise RequestError(f"{side} = {pixels} is not a multiple of {multiple} pixels; nearest that is: {nearest}")


def check_is_image(geometry: Geometry, name: str) -> None:
    """Raises RequestError for more than one frame."""
    if geometry.num_frames != 1:
        raise RequestError(f"num_frames = {geometry.num_frames}: {name} makes images, so it must be 1")
