"""Items to what the transformer is trained on: clean latents and conditioning rows, from the caches where they are."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from verst.data.buckets import Bucket, fit
from verst.data.cache import TensorCache, folder_fingerprint
from verst.data.items import IMAGES, FileRef, Item
from verst.data.media import Window, load_clip, load_picture, load_sound, probe, window_of
from verst.errors import ConfigError, DataError
from verst.families import Components
from verst.families.base import EncodesSound, SeesImages, TakesImages
from verst.types import Geometry, Latents, join_rows

_VERSION = 1
"""Raised when decoding, fitting or encoding change what they give: older cache entries are then not found."""
_TRAINED = ("transformer", "transformer_2")

Row = dict[str, Tensor]
"""Conditioning name -> [1, ...]"""


class Encoder:
    """One item at a time and alone, so that what it becomes depends on no other item and on no cache."""

    def __init__(
        self,
        components: Components,
        *,
        max_sequence_length: int,
        latents: TensorCache | None,
        text: TensorCache | None,
        first_frame_as_condition: bool,
    ) -> None:
        """Raises ConfigError or ModelError when the family's sound has no encoder."""
        self._components = components
        self._max_sequence_length = max_sequence_length
        self._latents, self._text = latents, text
        self._first_frame = first_frame_as_condition
        self._sound: tuple[int, int] | None = None
        family = components.family
        if "audio" in family.streams:
            if not isinstance(family, EncodesSound):
                raise ConfigError(
                    f"model.path: {family.name} makes sound, and its sound cannot be encoded for training"
                )
            self._sound = family.sound_format(components)
        self._fingerprint = "" if latents is None and text is None else encoder_fingerprint(components)

    def latents(self, item: Item, index: int, bucket: Bucket) -> Latents:
        """stream -> [1, ...] fp32 clean latents of the item's file number `index`, on the CPU. Raises DataError."""
        make = functools.partial(self._encode, item, index, bucket)
        if self._latents is None:
            return {name: tensor.cpu() for name, tensor in make().items()}
        files = [item.media[index], *([item.audio] if item.audio else [])]
        key = {"content": [ref.digest() for ref in files], "bucket": asdict(bucket), **self._base("latents")}
        return self._latents.get(key, make)

    def condition(self, item: Item, caption: str, bucket: Bucket) -> Row:
        """The item's conditioning with `caption` for its own, [1, ...] each, on the CPU. Raises DataError."""
        make = functools.partial(self._condition, item, caption, bucket)
        if self._text is None:
            return {name: tensor.cpu() for name, tensor in make().items()}
        image = self._image_ref(item)
        key = {
            "caption": caption,
            "bucket": asdict(bucket),
            "image": image.digest() if image else "",
            "max_sequence_length": self._max_sequence_length,
            "dtype": str(self._components.dtype),
            **self._base("text"),
        }
        return self._text.get(key, make)

    def _base(self, kind: str) -> dict[str, Any]:
        return {
            "kind": kind,
            "version": _VERSION,
            "encoders": self._fingerprint,
            "family": self._components.family.name,
        }

    @torch.no_grad()
    def _encode(self, item: Item, index: int, bucket: Bucket) -> Latents:
        components, family, geometry = self._components, self._components.family, geometry_of(bucket)
        frames, window = read_frames(item.media[index], bucket)
        x0 = family.encode_media(components, frames.unsqueeze(0).to(components.device))
        wanted = family.latent_shapes(components, geometry)
        if "audio" in wanted:
            assert self._sound is not None
            assert isinstance(family, EncodesSound)
            if window is None:
                raise DataError(f"is a picture without sound, and {family.name} learns picture and sound together")
            rate, channels = self._sound
            sound = load_sound(
                item.audio or item.media[index],
                start_s=window.start_s,
                seconds=window.num_frames / window.fps,
                sample_rate=rate,
                channels=channels,
            )
            x0 |= family.encode_audio(components, sound.unsqueeze(0).to(components.device), geometry)
        got = {name: tuple(x.shape[1:]) for name, x in x0.items()}
        if got != wanted:
            raise ConfigError(
                f"{family.name} encodes {bucket} to {got}, and is trained on {wanted}: it cannot learn from it"
            )
        for name, x in x0.items():
            if not x.isfinite().all():
                raise DataError(f"its {name} latents are not finite")
        return x0

    @torch.no_grad()
    def _condition(self, item: Item, caption: str, bucket: Bucket) -> Row:
        components, family, geometry = self._components, self._components.family, geometry_of(bucket)
        options: dict[str, Any] = {"max_sequence_length": self._max_sequence_length, "geometry": geometry}
        image = self._condition_image(item, bucket)
        if image is None:
            return family.encode_prompts(components, [caption], **options)
        assert isinstance(family, TakesImages)
        if isinstance(family, SeesImages):
            rows = family.encode_prompts_with_images(components, [caption], [image], **options)
        else:
            rows = family.encode_prompts(components, [caption], **options)
        return rows | family.encode_images(components, [image], geometry)

    def _image_ref(self, item: Item) -> FileRef | None:
        return item.media[0] if self._first_frame else item.image

    def _condition_image(self, item: Item, bucket: Bucket) -> Tensor | None:
        """uint8 [H, W, 3] of the bucket's size: rows of a batch then are of one shape."""
        if self._first_frame:
            return read_frames(item.media[0], bucket)[0][0]
        if item.image is None:
            return None
        return fit(load_picture(item.image), height=bucket.height, width=bucket.width)[0]


def read_frames(ref: FileRef, bucket: Bucket) -> tuple[Tensor, Window | None]:
    """uint8 [F, H, W, 3] of the bucket's size, and the stretch of the clip that it is. Raises DataError."""
    if ref.suffix in IMAGES:
        return fit(load_picture(ref), height=bucket.height, width=bucket.width), None
    found = probe(ref)
    window = window_of(found, num_frames=bucket.num_frames, fps=bucket.fps or found.fps or 1.0)
    return fit(load_clip(ref, window), height=bucket.height, width=bucket.width), window


def geometry_of(bucket: Bucket) -> Geometry:
    return Geometry(height=bucket.height, width=bucket.width, num_frames=bucket.num_frames, fps=bucket.fps)


def join_latents(parts: Sequence[Latents], device: torch.device) -> Latents:
    return {name: torch.cat([part[name] for part in parts]).to(device) for name in parts[0]}


def join_condition(parts: Sequence[Row], device: torch.device) -> Row:
    return {name: tensor.to(device) for name, tensor in join_rows(parts).items()}


def encoder_fingerprint(components: Components) -> str:
    """Of the files (weights and configs) of everything loaded but the transformers and schedulers."""
    modules: Mapping[str, Any] = components.modules
    folders = {
        name: components.folder / name
        for name, module in modules.items()
        if module is not None and name not in _TRAINED and _encodes(module)
    }
    return folder_fingerprint(folders)


def _encodes(module: Any) -> bool:
    """Encoders, and the tokenizers and processors before them; a scheduler is neither."""
    return isinstance(module, nn.Module) or not hasattr(module, "set_timesteps")
