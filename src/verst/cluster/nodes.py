"""What processes on several nodes must agree about: folders that all of them see, and addresses that all of them reach."""

from __future__ import annotations

import ipaddress
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from verst.config.recipe import RlRecipe
from verst.config.sections import DiskSync
from verst.errors import ConfigError
from verst.trainer.topology import Place

Model = TypeVar("Model", bound=BaseModel)


def with_absolute_paths(table: Model) -> Model:
    """The same with every relative path that leads somewhere from here made absolute: workers start in another folder."""

    def converted(value: Any) -> Any:
        if isinstance(value, Path):
            return value.absolute() if value.exists() or value.parent.exists() else value
        if isinstance(value, BaseModel):
            return with_absolute_paths(value)
        return tuple(map(converted, value)) if isinstance(value, tuple) else value

    return table.model_copy(update={name: converted(value) for name, value in table})


class SharedFolders:
    """A file of a name that nobody else has in each folder that must be one and the same on all nodes."""

    def __init__(self, recipe: RlRecipe) -> None:
        """Writes them; `remove` takes them away."""
        folders = {"run.folder": recipe.run.folder / recipe.run.name}
        if isinstance(recipe.sync, DiskSync):
            folders["sync.folder"] = recipe.sync.folder
        name = f".seen-{uuid.uuid4().hex}"
        self.marks: dict[str, Path] = {}
        """Key of the recipe -> file."""
        for key, folder in folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            self.marks[key] = folder / name
            self.marks[key].touch()
        self.wanted = {"model.path": recipe.model.path, **self.marks}

    def remove(self) -> None:
        for mark in self.marks.values():
            mark.unlink(missing_ok=True)


def unseen(wanted: Mapping[str, Path]) -> list[str]:
    """The keys whose files are not there on this node."""
    return [key for key, path in wanted.items() if not path.exists()]


def check_seen(missing: Sequence[tuple[str, str, Sequence[str]]], wanted: Mapping[str, Path]) -> None:
    """missing: (role, node, keys that it does not see). Raises ConfigError for the first."""
    for role, node, keys in missing:
        if keys:
            key = keys[0]
            path = wanted[key] if key == "model.path" else wanted[key].parent
            raise ConfigError(
                f"{key} = {str(path)!r} is not there for the {role} on node {node}: all nodes need the same files under the "
                "same path; use a folder that they share (NFS, a PersistentVolume)"
                + (", or a copy of the model on each" if key == "model.path" else "")
            )


def check_addresses(host: str | None, driver: Place, engines: Sequence[Place]) -> None:
    """Raises ConfigError where engines would listen on their own machine alone, and the driver is on another."""
    elsewhere = sum(place.host != driver.host for place in engines)
    if elsewhere and host is not None and _is_loopback(host):
        raise ConfigError(
            f"engine.host = {host!r} can only be reached on its own machine, and {elsewhere} engines are on others than the "
            "driver: leave engine.host unset (each engine then listens on its node's address), or name an interface"
        )


def advertised(url: str, node_address: str) -> str:
    """The URL under which others reach a server that listens on all interfaces."""
    for everywhere in ("0.0.0.0", "[::]"):
        url = url.replace(f"//{everywhere}:", f"//{node_address}:")
    return url


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
