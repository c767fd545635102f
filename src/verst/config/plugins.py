"""What a recipe brings along: an object by `module:object`, or by the name of an installed entry point."""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from verst.errors import ConfigError

ObjectPath = Annotated[str, Field(pattern=r"^([\w.]+:[\w.]+|[\w.-]+)$")]
"""`module:object`, or the name of an entry point."""


def load_object(path: str, *, group: str, key: str) -> Any:
    """The object that `path` names: `module:object` (the current folder is searched too), or an entry point of `group`.

    key: the recipe key that holds the path, for messages. Raises ConfigError where there is no such object.
    """
    module, colon, name = path.partition(":")
    if not colon:
        return _entry_point(path, group=group, key=key)
    folder = str(Path.cwd())
    if folder not in sys.path:
        # The `verst` command puts its own folder on the path, not the one with the user's module.
        sys.path.append(folder)
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} = {path!r} cannot be imported: {error}") from error


def _entry_point(name: str, *, group: str, key: str) -> Any:
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none is installed"
        raise ConfigError(
            f"{key} = {name!r} is neither module:object nor an entry point of the group {group} ({known})"
        )
    try:
        return found[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{key} = {name!r}: the entry point {found[name].value} cannot be imported: {error}"
        ) from error
