"""A source of files as batches by step, and the items kept from training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from verst.config.data import FilesData
from verst.data.bad_files import STARTUP, BadFiles
from verst.data.buckets import Bucket, nearest_bucket
from verst.data.cache import TensorCache
from verst.data.encode import Encoder, Row, geometry_of, join_condition, join_latents
from verst.data.items import Item
from verst.data.media import Probe, load_picture, probe
from verst.data.order import Order
from verst.data.sources import read_items
from verst.errors import ConfigError, DataError, PromptError, RequestError
from verst.families import Components
from verst.families.base import ANY_IMAGES, SOME_IMAGES, SamplingDefaults
from verst.flow.noise import derive_seed
from verst.types import Geometry, Latents

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Items of one bucket, on the model's device."""

    items: tuple[Item, ...]
    bucket: Bucket
    x0: tuple[Latents, ...]
    """One a file of an item (of preferences two, the chosen one first): stream -> [B, ...] fp32."""
    num_replaced: int = 0
    """Slots in which the next item stands, because theirs could not be used."""

    @property
    def geometry(self) -> Geometry:
        return geometry_of(self.bucket)


class FileDataset:
    """Every batch is a pure function of (seed, step), of the files, and of nothing else."""

    def __init__(
        self,
        config: FilesData,
        components: Components,
        bad: BadFiles,
        *,
        size: tuple[int, int],
        num_frames: int,
        fps: float | None,
        batch_size: int,
        seed: int,
        encoder: Encoder,
        caches: Sequence[TensorCache],
    ) -> None:
        """size: (height, width) where the recipe names no bucket. Raises ConfigError or DataError."""
        self._components = components
        self._bad = bad
        self._encoder = encoder
        self._batch_size = batch_size
        self.caches = tuple(caches)
        self._seen_images: set[str] = set()
        """Condition images that were decoded once without an error."""
        defaults = components.family.sampling_defaults(components)
        buckets = make_buckets(config, size=size, num_frames=num_frames, fps=fps, defaults=defaults)
        check_buckets(components, buckets)
        items = read_items(config, bad)
        check_condition(components, config, items)
        placed, self.num_dropped = self._place(items, buckets, config)
        names = sorted((item.key for _, item in placed), key=lambda key: derive_seed("heldout", key))
        kept = set(names[: config.heldout])
        self._heldout = _by_bucket([pair for pair in placed if pair[1].key in kept])
        self._items = _by_bucket([pair for pair in placed if pair[1].key not in kept])
        if not self._items:
            raise DataError(
                f"of {len(items)} items none is left to train on: {len(bad)} bad files, {self.num_dropped} too small or "
                f"too short, {len(kept)} held out"
            )
        counts = {bucket: len(found) for bucket, found in self._items.items()}
        self.num_items = sum(counts.values())
        self._order = Order(counts, batch_size=batch_size, seed=derive_seed(seed, "data"))

    @property
    def captions(self) -> list[str]:
        """Of every item, held-out ones included."""
        groups = [*self._items.values(), *self._heldout.values()]
        return list(dict.fromkeys(item.caption for items in groups for item in items))

    def batch(self, step: int) -> Encoded:
        """The items of `step`, their latents read or encoded. Raises DataError when no item of a bucket is usable."""
        slots = self._order.batch(step)
        items, files, replaced = [], [], 0
        for position in range(slots.first, slots.first + self._batch_size):
            item, latents, skipped = self._usable(slots.bucket, position, step)
            items.append(item)
            files.append(latents)
            replaced += skipped > 0
        return self._encoded(slots.bucket, items, files, replaced)

    def heldout(
        self, batch_size: int, *, on_item: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Encoded]:
        """The held-out items, bucket by bucket. Raises DataError when none is usable.

        on_item: told before each how many are done, of how many.
        """
        batches: list[Encoded] = []
        done, total = 0, sum(len(items) for items in self._heldout.values())
        for bucket, items in self._heldout.items():
            good = []
            for item in items:
                on_item(done, total)
                files = self._try(item, bucket, step=STARTUP)
                done += 1
                if files is not None:
                    good.append((item, files))
            for start in range(0, len(good), batch_size):
                chosen = good[start : start + batch_size]
                batches.append(self._encoded(bucket, [item for item, _ in chosen], [files for _, files in chosen], 0))
        if self._heldout and not batches:
            raise DataError("none of the held-out items could be used; see bad_files.jsonl")
        return batches

    def condition(self, batch: Encoded, captions: Sequence[str]) -> Row:
        """Conditioning rows of a batch with these captions for its own. Raises PromptError."""
        pairs = zip(batch.items, captions, strict=True)
        parts = [self._encoder.condition(item, caption, batch.bucket) for item, caption in pairs]
        return join_condition(parts, self._components.device)

    def check_empty_caption(self) -> None:
        """Raises ConfigError for a model that has no way to say nothing, before the first dropped caption comes."""
        bucket, items = next(iter(self._items.items()))
        try:
            self._encoder.condition(items[0], "", bucket)
        except PromptError as error:
            raise ConfigError(f"algorithm.caption_dropout: {error}; set it to 0") from None

    def _place(
        self, items: Sequence[Item], buckets: Sequence[Bucket], config: FilesData
    ) -> tuple[list[tuple[Bucket, Item]], int]:
        """Each item with its bucket; how many are too small or too short for any."""
        placed, dropped = [], 0
        for item in items:
            found = self._named(item, functools.partial(_probe_all, item), step=STARTUP)
            if found is None:
                continue
            try:
                bucket = nearest_bucket(found[0], buckets, max_upscale=config.buckets.max_upscale)
                for other in found[1:]:
                    nearest_bucket(other, [bucket], max_upscale=config.buckets.max_upscale)
            except DataError:
                dropped += 1
                continue
            placed.append((bucket, item))
        return placed, dropped

    def _usable(self, bucket: Bucket, position: int, step: int) -> tuple[Item, list[Latents], int]:
        """The item at a position of the bucket's stream, or the first good one after it, and how many were passed."""
        items = self._items[bucket]
        for skipped in range(len(items)):
            item = items[self._order.item(bucket, position + skipped)]
            files = self._try(item, bucket, step=step)
            if files is not None:
                return item, files, skipped
        raise DataError(f"none of {len(items)} items of bucket {bucket} could be used; see bad_files.jsonl")

    def _try(self, item: Item, bucket: Bucket, *, step: int) -> list[Latents] | None:
        def encode() -> list[Latents]:
            if item.image is not None and item.image.name not in self._seen_images:
                load_picture(item.image)
                self._seen_images.add(item.image.name)
            return [self._encoder.latents(item, index, bucket) for index in range(len(item.media))]

        return self._named(item, encode, step=step)

    def _named(self, item: Item, call: Callable[[], T], *, step: int) -> T | None:
        """None, and a bad file, where the item's files cannot be used."""
        try:
            return call()
        except DataError as error:
            self._bad.add(_names(item), str(error), step=step)
            return None

    def _encoded(
        self, bucket: Bucket, items: Sequence[Item], files: Sequence[Sequence[Latents]], replaced: int
    ) -> Encoded:
        device = self._components.device
        x0 = tuple(join_latents([row[index] for row in files], device) for index in range(len(files[0])))
        return Encoded(items=tuple(items), bucket=bucket, x0=x0, num_replaced=replaced)


def _probe_all(item: Item) -> list[Probe]:
    return [probe(ref) for ref in item.media]


def _names(item: Item) -> str:
    """The key, and the files that it stands for where it is not their name."""
    names = [ref.name for ref in (*item.media, item.audio, item.image) if ref is not None and ref.name != item.key]
    return f"{item.key} ({', '.join(names)})" if names else item.key


def _by_bucket(placed: Sequence[tuple[Bucket, Item]]) -> dict[Bucket, list[Item]]:
    return {
        bucket: [item for own, item in placed if own == bucket]
        for bucket in sorted({bucket for bucket, _ in placed}, key=_rank)
    }


def _rank(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.num_frames, bucket.height, bucket.width


def make_buckets(
    config: FilesData, *, size: tuple[int, int], num_frames: int, fps: float | None, defaults: SamplingDefaults
) -> list[Bucket]:
    """Every size with every number of frames; clips have frames a second, pictures none."""
    rate = config.buckets.fps or fps or defaults.geometry.fps
    counts = config.buckets.frames or (num_frames,)
    return [
        Bucket(height=height, width=width, num_frames=count, fps=rate if count > 1 else None)
        for height, width in config.buckets.all_sizes(size)
        for count in dict.fromkeys(counts)
    ]


def check_buckets(components: Components, buckets: Sequence[Bucket]) -> None:
    """Raises ConfigError for a size or length that the model cannot make."""
    for bucket in buckets:
        try:
            components.family.check_geometry(components, geometry_of(bucket))
        except RequestError as error:
            raise ConfigError(
                f"data.buckets: {bucket.height}x{bucket.width}, {bucket.num_frames} frames: {error}"
            ) from None


def check_condition(components: Components, config: FilesData, items: Sequence[Item]) -> None:
    """Raises ConfigError when a family gets no condition image, or one that it does not take."""
    family, given = components.family, config.first_frame_as_condition or any(item.image for item in items)
    if given and family.num_images == 0:
        raise ConfigError(
            f"{family.name} takes no condition image; remove data.image and data.first_frame_as_condition"
        )
    if not given and family.num_images not in (0, ANY_IMAGES):
        many = (
            "at least one condition image"
            if family.num_images == SOME_IMAGES
            else f"{family.num_images} condition image"
        )
        raise ConfigError(
            f"{family.name} needs {many} an item: name a column with data.image (data.type = manifest), or set "
            "data.first_frame_as_condition = true"
        )


def cache_metrics(caches: Sequence[TensorCache]) -> Mapping[str, float]:
    """Counts since the start of this process; names of docs/metrics.md."""
    if not caches:
        return {}
    return {
        "perf/cache_hits": float(sum(cache.num_hits for cache in caches)),
        "perf/cache_misses": float(sum(cache.num_misses for cache in caches)),
        "perf/cache_damaged": float(sum(cache.num_damaged for cache in caches)),
        "perf/cache_bytes": float(sum(cache.num_bytes for cache in caches)),
    }
