"""Prompt files as rows: what every kind of file comes down to before its columns are read."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from verst.errors import PromptError
from verst.rollout.columns import from_text

Rows = Iterator[tuple[str, dict[str, Any]]]
"""file:line, and the row's values by column; a column that the row leaves empty is not there."""


def _txt(path: Path) -> Rows:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", {"prompt": line}


def _jsonl(path: Path) -> Rows:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line, parse_constant=_no_number)
        except json.JSONDecodeError as error:
            raise PromptError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
        except _NoNumber as error:
            raise PromptError(f"{where}: {error} is no JSON value; leave the key out, or write null") from None
        except (RecursionError, ValueError) as error:  # nested too deep, or a number of thousands of digits
            raise PromptError(f"{where}: not JSON that can be read: {error}") from None
        if not isinstance(row, dict):
            raise PromptError(f'{where}: a line must be an object like {{"prompt": "..."}}, got {line[:60]}')
        if "prompt" not in row:
            raise PromptError(f"{where}: no `prompt` among {sorted(row)}")
        yield where, {name: value for name, value in row.items() if value is not None or name == "prompt"}


def _csv(path: Path) -> Rows:
    text = _read_text(path)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = list(reader.fieldnames or [])
        if "prompt" not in header:
            raise PromptError(f"{path}:1: no column `prompt` in the header {header}")
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise PromptError(f"{path}:1: the header names {', '.join(twice)} twice")
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise PromptError(f"{where}: the header has {len(header)} columns, this line has not")
            yield where, {name: from_text(name, cell) for name, cell in row.items() if cell or name == "prompt"}
    except csv.Error as error:  # raised before the line is counted
        line = min(reader.line_num + 1, text.count("\n") + 1)
        raise PromptError(f"{path}:{line}: {error}") from None


def _parquet(path: Path) -> Rows:
    # Slow to import, and of no use to other kinds of file.
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            columns = table.schema_arrow.names
            if "prompt" not in columns:
                raise PromptError(f"{path}: no column `prompt` among {columns}")
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield (
                        f"{path}: row {number}",
                        {name: value for name, value in row.items() if not _is_empty(value) or name == "prompt"},
                    )
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise PromptError(f"{path} cannot be read as Parquet (after row {number}): {error}") from None


def _is_empty(value: Any) -> bool:
    """A null; or NaN, which is what pandas makes of a null among numbers."""
    return value is None or (isinstance(value, float) and math.isnan(value))


class _NoNumber(Exception):
    """NaN or Infinity, which Python's JSON would take."""


def _no_number(text: str) -> NoReturn:
    raise _NoNumber(text)


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


READERS: dict[str, Callable[[Path], Rows]] = {".txt": _txt, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
"""File ending -> its rows, in order."""
