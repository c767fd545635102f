"""Tar shards as WebDataset lays them out, indexed once: every member is then read by its offset."""

from __future__ import annotations

import glob
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

from verst.data.bad_files import BadFiles
from verst.data.items import IMAGES, SOUNDS, VIDEOS, FileRef, Item
from verst.errors import DataError

ReadCaption = Callable[[bytes, str, str, BadFiles], str | None]


def read_shards(pattern: str, bad: BadFiles, *, caption_key: str, caption_of: ReadCaption) -> list[Item]:
    """Raises DataError when the pattern matches no file."""
    items = []
    for shard in expand(pattern):
        for key, members in _index(shard, bad).items():
            item = _item(f"{shard.name}:{key}", members, bad, caption_key, caption_of)
            if item is not None:
                items.append(item)
    return items


def expand(pattern: str) -> list[Path]:
    """The files of `a-{000..012}.tar`, `{a,b}.tar` and stars, in order. Raises DataError."""
    files: list[Path] = []
    for name in _braces(pattern):
        found = sorted(glob.glob(name, recursive=True))
        if not found:
            raise DataError(f"data.shards = {pattern!r}: there is no file {name!r}")
        files += [Path(path) for path in found]
    return list(dict.fromkeys(files))


def _braces(pattern: str) -> list[str]:
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if numbers:
        low, high = int(numbers[1]), int(numbers[2])
        choices = [f"{n:0{len(numbers[1])}d}" for n in range(low, high + 1)]
    else:
        choices = match[1].split(",")
    return [rest for choice in choices for rest in _braces(pattern[: match.start()] + choice + pattern[match.end() :])]


def _index(shard: Path, bad: BadFiles) -> dict[str, dict[str, FileRef]]:
    """key -> suffix -> member. A key is the name up to the first dot after its folder."""
    groups: dict[str, dict[str, FileRef]] = {}
    num_bytes = shard.stat().st_size
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                if member.offset_data + member.size > num_bytes:
                    bad.add(f"{shard.name}:{member.name}", f"is cut off: {shard.name} is truncated")
                    break
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                group = groups.setdefault(f"{folder}/{stem}" if folder else stem, {})
                if suffix.lower() in group:
                    bad.add(f"{shard.name}:{member.name}", "is there a second time; the first one is used")
                    continue
                name = f"{shard.name}:{member.name}"
                group[suffix.lower()] = FileRef(path=shard, name=name, offset=member.offset_data, size=member.size)
            else:
                _check_end(shard, tar, bad)
    except tarfile.TarError as error:
        bad.add(shard.name, f"is no whole tar file: {error}; what comes before the damage is used")
    return groups


def _check_end(shard: Path, tar: tarfile.TarFile, bad: BadFiles) -> None:
    """tarfile takes a damaged header for the end of the archive, and so does it the end of a file that was cut."""
    with shard.open("rb") as file:
        file.seek(tar.offset)
        header = file.read(tarfile.BLOCKSIZE)
    if header.strip(b"\0"):
        bad.add(shard.name, f"is damaged at byte {tar.offset}; what comes before it is used")
    elif len(header) < tarfile.BLOCKSIZE:
        bad.add(shard.name, "may be cut off: the zeros that end a tar file are not there; what is there is used")


def _item(
    key: str, members: dict[str, FileRef], bad: BadFiles, caption_key: str, caption_of: ReadCaption
) -> Item | None:
    visual = [ref for suffix, ref in members.items() if f".{suffix}" in IMAGES + VIDEOS]
    sounds = [ref for suffix, ref in members.items() if f".{suffix}" in SOUNDS]
    if len(visual) != 1:
        found = ", ".join(sorted(members))
        bad.add(key, f"needs one picture or clip, and has {len(visual)} (members: {found})")
        return None
    text = members.get("txt") or members.get("json")
    if text is None:
        bad.add(key, "has no caption: neither .txt nor .json")
        return None
    try:
        data = text.read()
    except DataError as error:
        bad.add(key, f"{text.name} {error}")
        return None
    if text.suffix == ".json":
        try:
            value = json.loads(data)
        except ValueError as error:
            bad.add(key, f"{text.name} is not JSON ({error})")
            return None
        caption = value.get(caption_key) if isinstance(value, dict) else None
        if not isinstance(caption, str):
            bad.add(key, f"{text.name} has no text under {caption_key!r} (data.caption)")
            return None
        data = caption.encode()
    caption = caption_of(data, key, text.name, bad)
    if caption is None:
        return None
    return Item(key=key, caption=caption, media=(visual[0],), audio=sounds[0] if sounds else None)
