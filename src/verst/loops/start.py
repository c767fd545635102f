"""From a recipe to its loop: the files it names, and which loop it is. Imports no torch before it has to."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING

from verst.config import Recipe, SftRecipe, missing_files
from verst.errors import ConfigError

if TYPE_CHECKING:
    from verst.loops.run_folder import RunFolder
    from verst.loops.stop import Asked


def with_files(recipe: Recipe, *, model: bool = True) -> Recipe:
    """The recipe, its files there; with `model` its model too, from the hub where a hub id names it.

    Raises ConfigError naming each file that is not there.
    """
    missing = missing_files(recipe, model=False)
    if missing:
        raise ConfigError("; ".join(missing))
    if not model or not missing_files(recipe):
        return recipe
    from verst.families.hub import local_folder

    folder = local_folder(recipe.model.path)
    found = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": folder})})
    missing = missing_files(found)
    if missing:
        raise ConfigError("; ".join(missing))
    return found


def load_loop(recipe: Recipe) -> None:
    """Import what `run_recipe` will: torch and Ray take seconds, which a caller may want to say something about."""
    importlib.import_module("verst.loops.sft" if isinstance(recipe, SftRecipe) else "verst.loops.rl")


def run_recipe(recipe: Recipe, folder: RunFolder, *, quiet: bool = False, asked: Asked | None = None) -> None:
    """Train to the end, or until somebody asks: Ctrl-C in the main thread, `asked` in another one.

    Not inside a running event loop. Raises asyncio.CancelledError where an RL run was asked twice.
    """
    if isinstance(recipe, SftRecipe):
        from verst.loops.sft import train_sft

        train_sft(recipe, folder, quiet=quiet, asked=asked)
        return
    from verst.loops.rl import train_rl

    asyncio.run(train_rl(recipe, folder, quiet=quiet, asked=asked))
