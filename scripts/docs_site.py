"""What `make docs` adds to docs/ while it builds the site: the front page, the pages that follow from code, links out of docs/.

A hook of MkDocs (mkdocs.yml). Nothing that it makes is kept in the repository, so nothing of it can be out of date.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from verst.cli import recipes
from verst.cli.main import app
from verst.cli.recipe_text import toml_value
from verst.config import RlRecipe, SftRecipe
from verst.config.load import models_in

ROOT = Path(__file__).parents[1]
# A hook is loaded by its file's path, which makes no package of its folder.
sys.path.insert(0, str(ROOT / "scripts"))

from docs_api import api_page  # noqa: E402

_UP = re.compile(r"\]\(\.\./([^)#]+)")
_NAMED = re.compile(r"(?<!\[)`docs/(\w+\.md)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made, and files beyond docs/ that pages link."""
    made = {
        "index.md": (ROOT / "README.md").read_text(),
        "architecture.md": (ROOT / "ARCHITECTURE.md").read_text(),
        "reference/keys.md": keys_page(),
        "reference/commands.md": commands_page(),
        "reference/recipes.md": recipes_page(),
        "reference/python.md": api_page(),
    }
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    written = [page for page in files.documentation_pages() if "/" not in page.src_uri]
    linked = {name for page in written for name in _UP.findall(page.content_string)}
    for name in sorted(linked):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Pages are written for the repository, where docs/ is a folder; here it is the root."""
    up = "../" * page.file.src_uri.count("/")
    text = _UP.sub(r"](\1", markdown) if not up else markdown
    text = text.replace("](docs/", f"]({up}")
    return _NAMED.sub(rf"[`docs/\1`]({up}\1)", text)


def keys_page() -> str:
    """Every table of both kinds of recipe with its keys, their types, defaults and meanings."""
    lines = [
        "# Every key of a recipe",
        "",
        "From the classes that read recipes. A default of - means that the key must be given. A table with `type` is one of several",
        "variants: its keys are those below the `type` that was chosen. `verst plan RECIPE` prints a recipe with all defaults filled in.",
        "",
    ]
    seen: dict[type[BaseModel], str] = {}
    for recipe, title in ((RlRecipe, "Reinforcement learning"), (SftRecipe, "Supervised")):
        lines += [f"## {title}", "", *_text(recipe), *_keys_table(recipe, ""), ""]
        for name, field in recipe.model_fields.items():
            lines += _tables(name, field, seen)
    return "\n".join(lines)


def _tables(path: str, field: FieldInfo, seen: dict[type[BaseModel], str]) -> Iterator[str]:
    """The tables that a key may hold, each once, and those within them."""
    models = models_in(field)
    elsewhere = {seen[model] for model in models if model in seen} - {path}
    if elsewhere:
        yield from (f"`{path}`: also the tables of {', '.join(f'`{other}`' for other in sorted(elsewhere))}.", "")
    for model in models:
        if model in seen:
            continue
        seen[model] = path
        kind = model.model_fields.get("type")
        variant = f", type = {toml_value(kind.default)}" if kind is not None else ""
        yield from (f"### `{path}`{variant}", "", *_text(model), *_keys_table(model, path), "")
        for name, inner in model.model_fields.items():
            yield from _tables(f"{path}.{name}", inner, seen)


def _text(model: type[BaseModel]) -> list[str]:
    """A class's own docstring; pydantic's is none."""
    text = model.__doc__ or ""
    return [" ".join(text.split()), ""] if text else []


def _keys_table(model: type[BaseModel], path: str) -> list[str]:
    rows = [
        f"| `{name}` | {_cell(type_name(field))} | {_cell(_default(field))} | {_cell(field.description or '')} |"
        for name, field in model.model_fields.items()
        if name != "type" or not path
    ]
    meaning = (model.model_fields["type"].description or "") if "type" in model.model_fields else ""
    about = [" ".join(meaning.split()), ""] if meaning else []
    return about + (["| key | value | default | meaning |", "|---|---|---|---|", *rows] if rows else ["No keys.", ""])


def _cell(text: str) -> str:
    """Plain text for a table; what stands between backticks stays as it is."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "-"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, BaseModel) or (isinstance(value, tuple) and any(isinstance(v, BaseModel) for v in value)):
        kinds = [getattr(v, "type", None) for v in (value if isinstance(value, tuple) else (value,))]
        return ", ".join(map(str, kinds)) if all(kinds) else "its own"
    return toml_value(str(value) if isinstance(value, Path) else value)


_BOUNDS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path", Any: "anything"}


def type_name(field: FieldInfo) -> str:
    """What a value may be, in words of TOML."""
    if models_in(field):
        return "list of tables" if _origin(field.annotation) is tuple else "table"
    return " ".join([_value_name(field.annotation), *(bound for m in field.metadata for bound in _bounds(m))])


def _origin(annotation: Any) -> Any:
    return _origin(get_args(annotation)[0]) if get_origin(annotation) is Annotated else get_origin(annotation)


def _value_name(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [b for m in inner[1:] for b in _bounds(m)]
        return " ".join([_value_name(inner[0]), *bounds])
    if origin is Literal:
        return ", ".join(toml_value(value) for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_value_name(one) for one in inner if one is not type(None))
    if origin is tuple:
        return f"list of {_value_name(inner[0])}"
    if origin is dict:
        return f"table of {_value_name(inner[1])}"
    return _NAMES.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _bounds(metadata: Any) -> list[str]:
    """Of pydantic's own Field or of annotated_types."""
    parts = metadata.metadata if isinstance(metadata, FieldInfo) else [metadata]
    return [f"{sign} {getattr(m, name):g}" for m in parts for name, sign in _BOUNDS if hasattr(m, name)]


def recipes_page() -> str:
    """What stands on top of each recipe: what it is for, what it needs, what to expect."""
    lines = ["# Recipes", "", "In `recipes/`; any key can be overridden on the command line.", ""]
    for path in recipes.paths():
        row = recipes.listed(path)
        lines += [f"## {row.name}", "", f"`{row.algorithm}`. {row.what} {row.result}", ""]
        lines += [f"    verst train recipes/{path.name}", ""]
    return "\n".join(lines)


def commands_page() -> str:
    """Every command with its arguments and options."""
    lines = ["# Commands", "", "`verst COMMAND --help` says the same.", ""]
    for name, command in _commands("verst", typer.main.get_command(app)):
        lines += [f"## `{name}`", "", " ".join((command.help or "").split()), ""]
        lines += ["| argument or option | default | meaning |", "|---|---|---|"]
        for parameter in command.params:
            if "--help" in parameter.opts or parameter.name in ("install_completion", "show_completion"):
                continue
            option = parameter.param_type_name == "option"
            title = ", ".join(parameter.opts) if option else parameter.metavar or parameter.name.upper()
            given = "-" if parameter.required else _given(parameter.default)
            lines.append(f"| `{title}` | {_cell(given)} | {_cell(getattr(parameter, 'help', None) or '')} |")
        lines.append("")
    return "\n".join(lines)


def _given(default: Any) -> str:
    return "" if default is None or default is PydanticUndefined or default == () else str(default)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for child, inner in children.items():
        yield from _commands(f"{name} {child}", inner)
