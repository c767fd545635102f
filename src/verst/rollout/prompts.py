"""Prompts by position: which prompt comes when is a function of one number, so that a resumed run needs no more."""

from __future__ import annotations

import csv
import functools
import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verst.errors import PromptError
from verst.flow.noise import derive_seed


@dataclass(frozen=True, kw_only=True)
class Prompt:
    text: str
    index: int
    """Place in the file, from 0, blank lines not counted."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of a .csv or keys of a .jsonl line."""


class PromptSource:
    """An endless sequence of prompts: the file over and over, each epoch in an order of its own.

    Epoch n's order follows from `derive_seed(seed, "epoch", n)` alone.
    """

    def __init__(self, path: Path, *, seed: int, shuffle: bool) -> None:
        """Reads the file. Raises PromptError."""
        self.prompts = read_prompts(path)
        self._seed = seed
        self._shuffle = shuffle
        # Two: consecutive positions may straddle the end of an epoch.
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        """Prompts in the file, i.e. positions of one epoch."""
        return len(self.prompts)

    def at(self, position: int) -> Prompt:
        """The prompt at `position` >= 0; position // len is the epoch."""
        if position < 0:
            raise ValueError(f"prompt position {position} is negative")
        epoch, offset = divmod(position, len(self.prompts))
        return self.prompts[self._order(epoch)[offset]]

    def _make_order(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self._shuffle:
            random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
        return order


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file in its order; duplicates stay, blank lines are skipped.

    .txt: one a line; .jsonl: objects with a string `prompt`; .csv: a header with the column `prompt`; UTF-8 throughout.
    Raises PromptError, with file:line, for a file that is missing, empty, of another kind or encoding, or a bad line.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise PromptError(f"{path}: prompt files end in {', '.join(_READERS)}")
    prompts = [
        Prompt(text=text.strip(), index=index, metadata=metadata)
        for index, (text, metadata) in enumerate(reader(path, _read_text(path)))
    ]
    if not prompts:
        raise PromptError(f"{path} holds no prompt")
    return prompts


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PromptError(f"prompt file {path} cannot be read: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise PromptError(
            f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8"
        ) from None


Rows = Iterator[tuple[str, dict[str, Any]]]


def _txt(path: Path, text: str) -> Rows:
    for line in text.split("\n"):
        if line.strip():
            yield line, {}


def _jsonl(path: Path, text: str) -> Rows:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(row, dict):
            raise PromptError(f'{path}:{number}: a line must be an object like {{"prompt": "..."}}, got {line[:60]}')
        yield _split(row, f"{path}:{number}")


def _csv(path: Path, text: str) -> Rows:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = list(reader.fieldnames or [])
        if "prompt" not in header:
            raise PromptError(f"{path}:1: no column `prompt` in the header {header}")
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise PromptError(f"{where}: the header has {len(header)} columns, this line has not")
            yield _split(row, where)
    except csv.Error as error:  # raised before the line is counted
        line = min(reader.line_num + 1, text.count("\n") + 1)
        raise PromptError(f"{path}:{line}: {error}") from None


def _split(row: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """The prompt of one row and its other values."""
    if "prompt" not in row:
        raise PromptError(f"{where}: no `prompt` among {sorted(row)}")
    text = row["prompt"]
    if not isinstance(text, str) or not text.strip():
        raise PromptError(f"{where}: `prompt` must be a text, got {text!r}")
    return text, {key: value for key, value in row.items() if key != "prompt"}


_READERS: dict[str, Callable[[Path, str], Rows]] = {".txt": _txt, ".jsonl": _jsonl, ".csv": _csv}
