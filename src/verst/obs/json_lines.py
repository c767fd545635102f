"""Files of one JSON object a line, whose last line may be half written: another process writes it, or was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from verst.errors import CheckpointError

Kind = type | UnionType


def read_rows(path: Path, keys: Mapping[str, Kind]) -> list[dict[str, Any]]:
    """All complete lines; a last line that is still being written is left out, a missing file is empty.

    keys: what every row has, and of which type. Raises CheckpointError, with file:line, for a line that is not one of ours.
    """
    if not path.exists():
        return []
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{path}:{number} is damaged: {error.msg}") from None
        if not isinstance(row, dict) or not all(isinstance(row.get(key), kind) for key, kind in keys.items()):
            raise CheckpointError(f"{path}:{number} is damaged: no {' or no '.join(keys)}")
        rows.append(row)
    return rows


def keep_rows(path: Path, keys: Mapping[str, Kind], keeps: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Write the file anew, whole or not at all, with the rows that stay; those rows. A missing file stays missing.

    Raises as `read_rows`.
    """
    if not path.exists():
        return []
    kept = [row for row in read_rows(path, keys) if keeps(row)]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in kept), encoding="utf-8")
    os.replace(partial, path)
    return kept


def drop_torn_line(path: Path) -> None:
    """Cut off what a killed process left of its last line."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
