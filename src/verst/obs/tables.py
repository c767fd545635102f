"""Nested tables, such as a recipe's, as flat ones."""

from __future__ import annotations

from typing import Any


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; entries of a list of tables are numbered."""
    if isinstance(data, dict):
        return {k: v for key, value in data.items() for k, v in flat(value, f"{prefix}{key}.").items()}
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return {k: v for i, value in enumerate(data) for k, v in flat(value, f"{prefix}{i}.").items()}
    return {prefix[:-1]: data}
