"""What several commands take, and JSON as all of them print it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from verst.obs.waiting import Tell

RecipePath = Annotated[Path, typer.Argument(help="Recipe in TOML.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value.", show_default=False)
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]
Checkpoint = Annotated[str, typer.Option(help="newest, best, or an iteration, e.g. 40.")]
Ema = Annotated[bool, typer.Option("--ema", help="Use the moving average of the weights.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, and no progress.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def waiting(*, quiet: bool = False) -> AbstractContextManager[Tell]:
    """See `verst.obs.waiting`; what takes long begins inside, imports included."""
    from verst.obs.waiting import waiting as shown

    return shown(quiet=quiet)


def print_json(value: Any) -> None:
    """Of records, tables and lists; a path is its text, and a number that is not finite is null."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
