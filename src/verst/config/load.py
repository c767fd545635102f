"""Read a recipe: TOML file, `section.key=value` overrides, errors that name key, value and what would be right."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from verst.config.recipe import Recipe, RlRecipe, SftRecipe
from verst.errors import ConfigError

_SYNONYMS = {"learning_rate": "lr", "eps": "adam_epsilon", "clip_range": "clip_high", "max_grad_norm": "grad_clip"}
"""What other trainers call our keys: a typo of theirs is answered with ours."""
_PATH_KEYS = (("model", "path"), ("prompts", "train"), ("prompts", "heldout"), ("data", "prompts"))


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The resolved recipe. Relative paths of model and prompts in the file are relative to the current folder.

    Raises ConfigError for an unreadable file, a wrong key, value or combination.
    """
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from None
    for override in overrides:
        _apply_override(data, override)
    return parse_recipe(data)


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """A recipe from nested tables. Raises ConfigError."""
    algorithm = data.get("algorithm")
    kind = algorithm.get("type") if isinstance(algorithm, dict) else None
    model: type[Recipe] = SftRecipe if kind == "sft" else RlRecipe
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(model, data, e) for e in error.errors())) from None


def missing_files(recipe: Recipe) -> list[str]:
    """One line for each file or folder the recipe names that is not there."""
    lines = []
    for section, key in _PATH_KEYS:
        table = getattr(recipe, section, None)
        value = getattr(table, key, None)
        built = section == "model" and isinstance(recipe, SftRecipe) and recipe.init is not None
        if value is not None and not built and not Path(value).exists():
            lines.append(f"{section}.{key} = {str(value)!r} does not exist")
    return lines


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override!r} must read section.key=value")
    *parents, leaf = key.split(".")
    table: Any = data
    for name in parents:
        if isinstance(table, list):
            table = _list_item(table, name, override)
        else:
            table = table.setdefault(name, {})
        if not isinstance(table, dict | list):
            raise ConfigError(f"override {override!r}: {name} is a value, not a table")
    if isinstance(table, list):
        table[int(leaf)] = _toml_value(text)
    else:
        table[leaf] = _toml_value(text)


def _list_item(table: list[Any], name: str, override: str) -> Any:
    if not name.isdigit() or int(name) >= len(table):
        raise ConfigError(f"override {override!r}: {name} must be a number below {len(table)}")
    return table[int(name)]


def _toml_value(text: str) -> Any:
    """`0.1`, `true`, `[1, 2]` as TOML; anything that is not TOML is a plain string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(model: type[BaseModel], data: dict[str, Any], error: Any) -> str:
    loc = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        valid = _keys_at(model, data, loc[:-1])
        names = {key: key for key in valid} | {k: v for k, v in _SYNONYMS.items() if v in valid}
        close = [names[key] for key in difflib.get_close_matches(str(loc[-1]), list(names), n=1, cutoff=0.5)]
        name = ".".join(str(part) for part in _real_location(data, loc))
        hint = f"did you mean {close[0]!r}?" if close else f"valid keys here: {', '.join(sorted(valid))}"
        return f"{name} = {error['input']!r} is not a key of the recipe; {hint}"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    name = ".".join(str(part) for part in _real_location(data, loc)) or "recipe"
    if error["type"] == "missing":
        return f"{name} is missing"
    return f"{name} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _real_location(data: Any, loc: tuple[Any, ...]) -> list[Any]:
    """pydantic puts a union's tag into the location; leave out what is no key of the data."""
    path: list[Any] = []
    node = data
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list | tuple) and isinstance(part, int) and part < len(node):
            node = node[part]
        elif not last:
            continue
        path.append(part)
    return path


def _keys_at(model: type[BaseModel], data: Any, loc: tuple[Any, ...]) -> list[str]:
    """Valid keys of the table at `loc`, following union tags and list positions."""
    fields = model.model_fields
    annotation: Any = model
    for part in loc:
        if isinstance(part, int):
            continue
        if part in fields:
            annotation = fields[part]
            tables = _models_in(annotation)
        else:
            tables = [t for t in _models_in(annotation) if _tag(t) == part]
        if tables:
            fields = {key: value for table in tables for key, value in table.model_fields.items()}
            annotation = annotation if part in model.model_fields or len(tables) > 1 else tables[0]
    return list(fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in _models_in(arg)]


def _tag(model: type[BaseModel]) -> str | None:
    info = model.model_fields.get("type")
    return None if info is None else info.default
