"""Read a recipe: TOML file, `section.key=value` overrides, errors that name key, value and what would be right."""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from verst.config.checks import did_you_mean
from verst.config.recipe import Recipe, RlRecipe, SftRecipe
from verst.config.stage_times import StageTimes
from verst.errors import ConfigError

Parsed = TypeVar("Parsed", bound=BaseModel)
_SYNONYMS = {"learning_rate": "lr", "eps": "adam_epsilon", "clip_range": "clip_high", "max_grad_norm": "grad_clip"}
"""What other trainers call our keys: a typo of theirs is answered with ours."""
_PATH_KEYS = (("model", "path"), ("prompts", "train"), ("prompts", "heldout"), ("data", "prompts"), ("data", "path"))


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The resolved recipe. Relative paths of model and prompts in the file are relative to the current folder.

    Raises ConfigError for an unreadable file, a wrong key, value or combination.
    """
    return parse_recipe(_read(path, "recipe"), overrides)


def parse_recipe(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from nested tables, which stay as they are. Raises ConfigError."""
    tables = copy.deepcopy(dict(data))
    for override in overrides:
        _apply_override(tables, override)
    return _parse(_recipe_class(tables), tables)


def load_stage_times(source: Path | Mapping[str, Any]) -> StageTimes:
    """What stages take, for `verst plan --simulate`: a TOML file, or the same as tables. Raises ConfigError."""
    return _parse(StageTimes, _read(source, "file of stage times") if isinstance(source, Path) else dict(source))


def _read(path: Path, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from None


def _parse(model: type[Parsed], data: dict[str, Any]) -> Parsed:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(model, data, e) for e in _causes(error.errors()))) from None


def _recipe_class(data: dict[str, Any]) -> type[Recipe]:
    """Which recipe it is follows from algorithm.type; without one the first class says what is missing."""
    classes: dict[str, type[Recipe]] = {
        str(_tag(table)): recipe
        for recipe in (RlRecipe, SftRecipe)
        for table in models_in(recipe.model_fields["algorithm"])
    }
    algorithm = data.get("algorithm")
    kind = algorithm.get("type") if isinstance(algorithm, dict) else None
    if kind is None:
        return RlRecipe
    if not isinstance(kind, str) or kind not in classes:
        raise ConfigError(f"algorithm.type = {kind!r}{did_you_mean(kind, list(classes))}")
    return classes[kind]


def missing_files(recipe: Recipe, *, model: bool = True) -> list[str]:
    """One line for each file or folder the recipe names that is not there. model: ask for model.path too."""
    lines = []
    adapter = getattr(recipe.model.finetune, "init", None)
    if adapter is not None and not adapter.exists():
        lines.append(f"model.finetune.init = {str(adapter)!r} does not exist")
    for section, key in _PATH_KEYS:
        if section == "model" and not model:
            continue
        table = getattr(recipe, section, None)
        value = getattr(table, key, None)
        maker = "init" if section == "model" else "make"
        built = (
            isinstance(recipe, SftRecipe) and getattr(recipe if section == "model" else table, maker, None) is not None
        )
        if value is not None and not built and not Path(value).exists():
            lines.append(f"{section}.{key} = {str(value)!r} does not exist")
    return lines


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    *parents, leaf = key.strip().split(".")
    if not sign or not leaf or not all(parents):
        raise ConfigError(f"override {override!r} must read section.key=value")
    table: Any = data
    for name in parents:
        table = table[_position(table, name, override)] if isinstance(table, list) else table.setdefault(name, {})
        if not isinstance(table, dict | list):
            raise ConfigError(f"override {override!r}: {name} is a value, not a table")
    table[_position(table, leaf, override) if isinstance(table, list) else leaf] = _toml_value(text)


def _position(table: list[Any], name: str, override: str) -> int:
    if not name.isdecimal() or int(name) >= len(table):
        raise ConfigError(f"override {override!r}: {name} must be a number below {len(table)}")
    return int(name)


def _toml_value(text: str) -> Any:
    """`0.1`, `true`, `[1, 2]` as TOML; anything that is not TOML is a plain string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _causes(errors: Sequence[Any]) -> list[Any]:
    """Without "too short" for a list whose items were refused: pydantic counts the good ones."""
    inner = [e["loc"] for e in errors]
    return [
        e
        for e in errors
        if e["type"] != "too_short" or not any(loc[: len(e["loc"])] == e["loc"] and loc != e["loc"] for loc in inner)
    ]


def _explain(model: type[BaseModel], data: dict[str, Any], error: Any) -> str:
    """One line: key, value, and what would be right."""
    loc, kind, context = tuple(error["loc"]), error["type"], error.get("ctx", {})
    if isinstance(context.get("error"), ConfigError):
        return str(context["error"])
    name = ".".join(str(part) for part in _real_location(data, loc)) or "recipe"
    value = error["input"]
    if kind == "extra_forbidden":
        return f"{name} = {value!r} is not a key of the recipe; {_nearest_key(str(loc[-1]), _keys_at(model, loc[:-1]))}"
    if kind == "missing":
        return f"{name} is missing"
    if kind == "union_tag_not_found":
        tags = ", ".join(repr(_tag(table)) for table in _tables_at(model, loc))
        return f"{name}.type is missing; one of: {tags}"
    if kind == "union_tag_invalid":
        return f"{name}.type = {context['tag']!r}{did_you_mean(context['tag'], _quoted(context['expected_tags']))}"
    if kind == "literal_error":
        return f"{name} = {value!r}{did_you_mean(value, _quoted(context['expected']))}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{name} = {value!r} must be a table with keys such as {', '.join(_keys_at(model, loc)[:4])}"
    return f"{name} = {value!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _nearest_key(key: str, valid: Sequence[str]) -> str:
    names = {name: name for name in valid} | {k: v for k, v in _SYNONYMS.items() if v in valid}
    close = difflib.get_close_matches(key, list(names), n=1, cutoff=0.5)
    return f"did you mean {names[close[0]]!r}?" if close else f"valid keys here: {', '.join(sorted(valid))}"


def _quoted(text: str) -> list[str]:
    """The words that pydantic lists in quotes."""
    return re.findall(r"'([^']*)'", text)


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


def _keys_at(model: type[BaseModel], loc: Sequence[Any]) -> list[str]:
    """Valid keys of the table at `loc`."""
    return list({key: None for table in _tables_at(model, loc) for key in table.model_fields})


def _tables_at(model: type[BaseModel], loc: Sequence[Any]) -> list[type[BaseModel]]:
    """The table at `loc`, or all variants of a union; list positions and pydantic's union tags lead on from there."""
    tables: list[type[BaseModel]] = [model]
    for part in loc:
        if isinstance(part, int):
            continue
        fields = [table.model_fields[part] for table in tables if part in table.model_fields]
        if fields:
            tables = [inner for field in fields for inner in models_in(field)]
        else:
            tables = [table for table in tables if _tag(table) == part]
    return tables


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The tables that a field, or what it is annotated with, may hold."""
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in models_in(arg)]


def _tag(model: type[BaseModel]) -> str | None:
    info = model.model_fields.get("type")
    return None if info is None else info.default
