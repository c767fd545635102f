"""Sources of items, one function each: a folder, a table, tar shards, a table of preferences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verst.config.data import FolderData, ManifestData, PreferenceData, WebDatasetData
from verst.data.bad_files import BadFiles
from verst.data.items import IMAGES, SOUNDS, VIDEOS, FileRef, Item
from verst.data.make_glyphs import make_glyph_pairs, make_glyphs
from verst.data.shards import read_shards
from verst.data.tables import Row, Table, read_table
from verst.errors import DataError

_METADATA = ("metadata.jsonl", "captions.jsonl", "metadata.csv")
_CAPTION_COLUMNS = ("text", "caption", "prompt")


def read_items(config: Any, bad: BadFiles) -> list[Item]:
    """The items of a source, sorted by key; what cannot be one goes to `bad`. Raises DataError."""
    _make_missing(config)
    items = sorted(_READERS[type(config)](config, bad), key=lambda item: item.key)
    if not items:
        raise DataError(f"data.type = {config.type}: no usable item was found{_count(bad)}")
    return items


def _make_missing(config: Any) -> None:
    """Raises DataError where there is nothing to draw."""
    if not isinstance(config, FolderData | PreferenceData) or config.make is None or config.path.exists():
        return
    draw = make_glyphs if isinstance(config, FolderData) else make_glyph_pairs
    try:
        lines = [line.strip() for line in config.make.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.make.prompts = {str(config.make.prompts)!r} cannot be read: {error}") from None
    if not lines:
        raise DataError(f"data.make.prompts = {str(config.make.prompts)!r} has no lines")
    draw(config.path, [lines[number % len(lines)] for number in range(config.make.num)])


def _count(bad: BadFiles) -> str:
    return f"; {len(bad)} bad files are named in bad_files.jsonl" if len(bad) else ""


def _folder(config: FolderData, bad: BadFiles) -> list[Item]:
    root = config.path
    if not root.is_dir():
        raise DataError(f"data.path = {str(root)!r} is no folder")
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and not _hidden(p, root))
    media = [name for name in names if Path(name).suffix.lower() in IMAGES + VIDEOS]
    sounds = {str(Path(name).with_suffix("")): name for name in names if Path(name).suffix.lower() in SOUNDS}
    metadata = next((name for name in _METADATA if (root / name).is_file()), None)
    captions = _listed(read_table(root / metadata), bad) if metadata else None
    items = []
    for name in media:
        caption = _beside(root, name, bad) if captions is None else captions.pop(name, None)
        sound = sounds.pop(str(Path(name).with_suffix("")), None)
        if caption is None:
            if captions is not None:
                bad.add(name, f"has no row in {metadata}")
            continue
        audio = FileRef(path=root / sound, name=sound) if sound else None
        items.append(Item(key=name, caption=caption, media=(FileRef(path=root / name, name=name),), audio=audio))
    for name in captions or ():
        bad.add(name, f"is listed in {metadata}, but there is no such picture or clip")
    for name in sounds.values():
        bad.add(name, "is sound without a clip of the same name")
    return items


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _listed(table: Table, bad: BadFiles) -> dict[str, str]:
    """File name -> caption, as in HF's ImageFolder."""
    table.require("file_name", "data.type = folder")
    column = table.first_of(_CAPTION_COLUMNS)
    captions: dict[str, str] = {}
    for row in table.rows:
        cells = _cells(row, {"file_name": "file_name", column: column}, bad)
        if cells is None:
            continue
        name = Path(cells["file_name"]).as_posix()
        if name in captions:
            bad.add(f"{row.place}", f"lists {name} a second time")
            continue
        captions[name] = cells[column]
    return captions


def _beside(root: Path, name: str, bad: BadFiles) -> str | None:
    path = (root / name).with_suffix(".txt")
    if not path.is_file():
        bad.add(name, f"has no caption: there is no {path.name} beside it")
        return None
    return caption_of(path.read_bytes(), name, path.name, bad)


def caption_of(data: bytes, name: str, source: str, bad: BadFiles) -> str | None:
    """The text of a caption file; None, and a bad file, where it is empty or not UTF-8."""
    try:
        caption = data.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        bad.add(name, f"has a caption that is not UTF-8: {source}, {error.reason} at byte {error.start}")
        return None
    if not caption:
        bad.add(name, f"has an empty caption: {source}")
        return None
    return caption


def _manifest(config: ManifestData, bad: BadFiles) -> list[Item]:
    wanted = {"media": config.media, "caption": config.caption, "audio": config.audio, "image": config.image}
    named = {key: column for key, column in wanted.items() if column is not None}
    items, root = [], config.path.parent
    for key, cells in _rows(config.path, named, bad):
        refs = {kind: _ref(root, cells[kind]) for kind in named if kind != "caption"}
        item = Item(
            key=key, caption=cells["caption"], media=(refs["media"],), audio=refs.get("audio"), image=refs.get("image")
        )
        items.append(item)
    return items


def _preferences(config: PreferenceData, bad: BadFiles) -> list[Item]:
    named = {"prompt": config.prompt, "chosen": config.chosen, "rejected": config.rejected}
    root = config.path.parent
    return [
        Item(key=key, caption=cells["prompt"], media=(_ref(root, cells["chosen"]), _ref(root, cells["rejected"])))
        for key, cells in _rows(config.path, named, bad)
    ]


def _rows(path: Path, named: Mapping[str, str], bad: BadFiles) -> list[tuple[str, dict[str, str]]]:
    """(key, cells by what they are) of the good rows. named: what it is -> column."""
    table = read_table(path)
    for key, column in named.items():
        table.require(column, f"data.{key}")
    rows = []
    for number, row in enumerate(table.rows):
        cells = _cells(row, named, bad)
        if cells is not None:
            # Zero-padded, so that the order by key is the table's.
            rows.append((f"{path.name}:{number:09d}", cells))
    return rows


def _cells(row: Row, named: Mapping[str, str], bad: BadFiles) -> dict[str, str] | None:
    """What it is -> cell; None, and a bad file, where one is missing, empty or no text."""
    if row.problem is not None:
        bad.add(row.place, row.problem)
        return None
    for column in named.values():
        value = row.values.get(column)
        if not isinstance(value, str) or not value.strip():
            what = (
                "is empty"
                if value in (None, "") or isinstance(value, str)
                else f"is a {type(value).__name__}, not text"
            )
            bad.add(row.place, f"{column} {what}")
            return None
    return {key: row.values[column].strip() for key, column in named.items()}


def _ref(root: Path, name: str) -> FileRef:
    """A path of a table, relative to the table's folder."""
    return FileRef(path=root / name, name=name)


def _webdataset(config: WebDatasetData, bad: BadFiles) -> list[Item]:
    return read_shards(config.shards, bad, caption_key=config.caption, caption_of=caption_of)


_READERS: dict[type, Callable[[Any, BadFiles], list[Item]]] = {
    FolderData: _folder,
    ManifestData: _manifest,
    WebDatasetData: _webdataset,
    PreferenceData: _preferences,
}
"""Recipe section -> reader."""
