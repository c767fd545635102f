"""What supervised training learns from: one table for each kind of source, with what all file sources share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from verst.config.basis import Flag, NonNegativeInt, PositiveFloat, PositiveInt, Section
from verst.errors import ConfigError


class TextLinesData(Section):
    type: Literal["text_lines"] = "text_lines"
    """Short strings rendered as images, made on the fly: digits of a fixed length, or words."""
    prompts: Path
    """Captions to draw, one a line; the held-out ones of [prompts] must not be among them."""
    fonts: tuple[str, ...] = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf")
    """TrueType files: by path, by name among those that matplotlib brings, or by a name that the system finds."""


class BucketsConfig(Section):
    """Sizes that files are brought to; a batch never mixes two. Without sizes and area: [sampling]'s height and width."""

    sizes: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    """Pixels, as [height, width] pairs."""
    area: PositiveInt | None = None
    """Pixels of a bucket; with `ratios` instead of `sizes`."""
    ratios: tuple[PositiveFloat, ...] = (1.0,)
    """Width by height of the buckets of `area`."""
    multiple: PositiveInt = 16
    """Height and width of the buckets of `area` are rounded to multiples of this."""
    frames: tuple[PositiveInt, ...] = ()
    """Frame counts; a clip goes to the largest that it fills. Unset = sampling.num_frames."""
    fps: PositiveFloat | None = None
    """Clips are brought to this many frames a second; unset = sampling.fps, or the model's own."""
    max_upscale: Annotated[float, Field(ge=1.0, strict=True)] = 1.0
    """A file that must be enlarged by more than this to fill its bucket is left out, and counted."""

    @model_validator(mode="after")
    def _one_way(self) -> BucketsConfig:
        if self.sizes and self.area is not None:
            raise ConfigError(
                f"data.buckets.area = {self.area} and data.buckets.sizes are two ways to say one thing; remove one"
            )
        return self

    def all_sizes(self, default: tuple[int, int]) -> list[tuple[int, int]]:
        """(height, width) of every bucket, without repeats."""
        if self.area is None:
            return list(dict.fromkeys(self.sizes or (default,)))
        sizes = []
        for ratio in self.ratios:
            height = math.sqrt(self.area / ratio)
            sizes.append((self._rounded(height), self._rounded(height * ratio)))
        return list(dict.fromkeys(sizes))

    def _rounded(self, pixels: float) -> int:
        return max(1, round(pixels / self.multiple)) * self.multiple


class CacheConfig(Section):
    folder: Path | None = None
    """Where encoded files and captions are kept between runs; unset = each is encoded every time it is used."""
    latents: Flag = True
    """Keep the latents of each file."""
    text: Flag = True
    """Keep the embeddings of each caption."""


class FilesData(Section):
    """What all sources of files share."""

    buckets: BucketsConfig = BucketsConfig()
    cache: CacheConfig = CacheConfig()
    on_bad_file: Literal["stop", "skip"] = "stop"
    """A file that cannot be used ends the run, or is left out and the next in order takes its place."""
    heldout: NonNegativeInt = 0
    """Items kept from training, on which the held-out loss is measured; chosen by a hash of their names."""
    heldout_sigmas: PositiveInt = 4
    """Noise levels at which each held-out item is measured, evenly spaced."""
    first_frame_as_condition: Flag = False
    """Of families with a condition image: each clip's own first frame."""
    prefetch: NonNegativeInt = 2
    """Batches that are read and encoded ahead, by a thread, while others train; 0 = none."""


class MakeDigits(Section):
    prompts: Path
    """What to draw, one a line."""
    num: PositiveInt = 1024
    """Pictures, or pairs of them; one a line, from the start again where there are fewer lines."""


class FolderData(FilesData):
    type: Literal["folder"] = "folder"
    """Pictures and clips with captions: x.txt beside x.jpg, or a metadata.jsonl, captions.jsonl or metadata.csv."""
    path: Path
    """The folder; subfolders count."""
    make: MakeDigits | None = None
    """Draw these short lines into `path` when the folder is missing."""


class ManifestData(FilesData):
    type: Literal["manifest"] = "manifest"
    """A table of files and captions: .jsonl, .csv or .parquet; paths are relative to its folder."""
    path: Path
    """The table."""
    media: str = "media"
    """Column with the path of the picture or clip."""
    caption: str = "caption"
    """Column with the caption."""
    audio: str | None = None
    """Column with the path of a clip's sound; unset = the sound inside the clip."""
    image: str | None = None
    """Column with the path of a condition image (edit source, first frame)."""


class WebDatasetData(FilesData):
    type: Literal["webdataset"] = "webdataset"
    """Local .tar shards: files of one name are one item, e.g. 0007.jpg and 0007.txt, or 0007.mp4 and 0007.json."""
    shards: str
    """Pattern of the shards, with braces and stars: data/train-{0000..0012}.tar."""
    caption: str = "caption"
    """Key of the caption in .json members."""


class PreferenceData(FilesData):
    type: Literal["preference_manifest"] = "preference_manifest"
    """Pairs of pictures or clips of one prompt, the better one named: .jsonl, .csv or .parquet."""
    path: Path
    """The table; paths in it are relative to its folder."""
    prompt: str = "prompt"
    """Column with the prompt."""
    chosen: str = "chosen"
    """Column with the path of the better one."""
    rejected: str = "rejected"
    """Column with the path of the worse one."""
    make: MakeDigits | None = None
    """Draw pairs of these lines of digits, readable and spoilt, beside `path` when the table is missing."""


DataConfig = TextLinesData | FolderData | ManifestData | WebDatasetData | PreferenceData


class AutoencoderConfig(Section):
    steps: NonNegativeInt = 0
    """SFT of a model built from nothing: optimizer steps for the autoencoder first; 0 = leave it as it is."""
    batch_size: PositiveInt = 128
    lr: PositiveFloat = 2e-3
