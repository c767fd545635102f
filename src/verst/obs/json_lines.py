"""Files of one JSON object a line, whose last line may be half written: another process writes it, or was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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


def drop_torn_line(path: Path) -> None:
    """Cut off what a killed process left of its last line."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
