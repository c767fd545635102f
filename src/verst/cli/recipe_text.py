"""A recipe as a file that a person goes on with: each key with what it means beside it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from verst.config import Recipe, parse_recipe
from verst.errors import ConfigError

_LONGEST = 100
"""Characters of a meaning that stands beside its key; of longer ones the field's docstring tells."""


def run_name(stem: str) -> str:
    """What of a file's name may be a run's."""
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]+", "", stem) or "run"


def check_free(path: Path) -> None:
    """Raises ConfigError where a file would be overwritten, or no file can be."""
    if path.exists():
        raise ConfigError(f"{path} exists already; name another file with --out, or move it away")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"folder {path.absolute().parent} does not exist; make it first, or name another --out")


def write_recipe(path: Path, tables: Mapping[str, Any], header: Sequence[str]) -> Recipe:
    """Write and return it as it loads. header: lines above it. Raises ConfigError, and then nothing is written."""
    check_free(path)
    text = recipe_text(tables, header)
    recipe = parse_recipe(tomllib.loads(text))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return recipe


def recipe_text(tables: Mapping[str, Any], header: Sequence[str]) -> str:
    """TOML of a recipe's tables, in their order. Raises ConfigError for what is no recipe."""
    recipe = parse_recipe(dict(tables))
    lines = [f"# {line}".rstrip() for line in header]
    for name, table in tables.items():
        section = getattr(recipe, name)
        rows = table if isinstance(table, list) else [table]
        models = section if isinstance(table, list) else [section]
        for row, model in zip(rows, models, strict=True):
            lines += ["", f"[[{name}]]" if isinstance(table, list) else f"[{name}]"]
            lines += [_line(key, value, model) for key, value in row.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def _line(key: str, value: Any, model: BaseModel) -> str:
    meaning = " ".join((type(model).model_fields[key].description or "").split())
    text = f"{key} = {toml_value(value)}"
    return f"{text}  # {meaning}" if meaning and len(meaning) <= _LONGEST else text


def toml_value(value: Any) -> str:
    """As it stands to the right of a key."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {toml_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()
