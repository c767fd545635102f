"""Tables of files and captions: .jsonl, .csv, .parquet. A line that cannot be read is a bad row; a table that cannot, an error."""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verst.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Row:
    place: str
    """`captions.jsonl line 3`."""
    values: dict[str, Any]
    problem: str | None = None
    """Why the line cannot be read; `values` is empty then."""


@dataclass(frozen=True, kw_only=True)
class Table:
    path: Path
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def require(self, column: str, key: str) -> None:
        """key: the recipe's, for the message. Raises DataError, naming the nearest column."""
        if column in self.columns:
            return
        close = difflib.get_close_matches(column, self.columns, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DataError(
            f"{self.path} has no column {column!r} ({key}); {hint}columns there: {', '.join(map(repr, self.columns))}"
        )

    def first_of(self, names: Sequence[str]) -> str:
        """The first of `names` that is a column. Raises DataError."""
        found = [name for name in names if name in self.columns]
        if not found:
            raise DataError(
                f"{self.path} has none of the columns {', '.join(map(repr, names))}; "
                f"columns there: {', '.join(map(repr, self.columns))}"
            )
        return found[0]


def read_table(path: Path) -> Table:
    """Raises DataError for a file that is missing, of another kind, empty, or no table."""
    readers = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: a table is a .jsonl, .csv or .parquet file")
    try:
        table = readers[path.suffix.lower()](path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not table.rows:
        raise DataError(f"{path} has no rows")
    return table


def _jsonl(path: Path) -> Table:
    rows = [
        _json_row(f"{path.name} line {n}", line)
        for n, line in enumerate(path.read_bytes().split(b"\n"), 1)
        if line.strip()
    ]
    return Table(path=path, columns=tuple({name: None for row in rows for name in row.values}), rows=tuple(rows))


def _json_row(place: str, line: bytes) -> Row:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(place=place, values={}, problem=f"is not UTF-8 ({error.reason} at byte {error.start})")
    except ValueError as error:
        return Row(place=place, values={}, problem=f"is not JSON ({error})")
    if not isinstance(values, dict):
        return Row(place=place, values={}, problem=f"is a {type(values).__name__}, not an object with keys")
    return Row(place=place, values=values)


def _csv(path: Path) -> Table:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{path} line {line} is not UTF-8 ({error.reason}); save the table as UTF-8") from None
    # Strict: an open quote would swallow all lines after it as one cell.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    begun = 1
    try:
        header = next(reader, [])
        rows = []
        begun = reader.line_num + 1
        for cells in reader:
            if cells:
                rows.append(_csv_row(f"{path.name} line {reader.line_num}", header, cells))
            begun = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}: the row that begins in line {begun} is no CSV: {error}") from None
    return Table(path=path, columns=tuple(header), rows=tuple(rows))


def _csv_row(place: str, header: Sequence[str], cells: Sequence[str]) -> Row:
    if len(cells) != len(header):
        return Row(place=place, values={}, problem=f"has {len(cells)} cells under {len(header)} columns")
    return Row(place=place, values=dict(zip(header, cells, strict=True)))


def _parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise DataError(f"{path} is no parquet table: {error}") from None
    rows = (Row(place=f"{path.name} row {n}", values=values) for n, values in enumerate(table.to_pylist()))
    return Table(path=path, columns=tuple(table.column_names), rows=tuple(rows))
