"""Recipes from files or tables, and rewards of one's own in them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from verst.config import RlRecipe, SftRecipe, load_recipe, parse_recipe, reward_name
from verst.config.plugins import load_object
from verst.config.rewards import OwnReward
from verst.errors import ConfigError

AnyRecipe = TypeVar("AnyRecipe", bound=RlRecipe | SftRecipe)
_GROUP = "verst.rewards"


class Recipe:
    """Where recipes come from. What `load` returns is a frozen `verst.RlRecipe` or `verst.SftRecipe`."""

    @staticmethod
    def load(source: str | Path | Mapping[str, Any], *overrides: str) -> RlRecipe | SftRecipe:
        """A TOML file, or the same as nested tables; then overrides such as `"trainer.lr=1e-4"`.

        Raises ConfigError, naming key, value and what would be right.
        """
        if isinstance(source, Mapping):
            return parse_recipe(source, overrides)
        return load_recipe(Path(source), overrides)


def with_rewards(recipe: AnyRecipe, rewards: Mapping[str, Callable[..., Any]]) -> AnyRecipe:
    """The same recipe with these rewards, name -> function `f(media, prompts)` or class (docs/rewards.md), in place of
    its own.

    A name that the recipe has as a reward of its own code keeps the rest of its table (weight, options, workers); others
    get the weight 1. The recipe names them as `module:object`, so that worker processes and a resumed run find them.
    Raises ConfigError for what cannot be imported that way: a lambda, a function inside a function, one of `__main__` or of
    a module that only this process finds.
    """
    tables = recipe.model_dump(mode="json", exclude_none=True)
    own = {
        reward_name(reward): table
        for reward, table in zip(recipe.rewards, tables["rewards"], strict=True)
        if isinstance(reward, OwnReward)
    }
    tables["rewards"] = [
        {"type": "python", **own.get(name, {}), "name": name, "path": object_path(target, name=name)}
        for name, target in rewards.items()
    ]
    found = parse_recipe(tables)
    assert isinstance(found, type(recipe))
    return found


def object_path(target: Any, *, name: str) -> str:
    """`module:object` of a function or class. Raises ConfigError where another process would not find it there."""
    key = f"rewards[{name!r}]"
    if not (inspect.isfunction(target) or inspect.isclass(target)):
        raise ConfigError(
            f"{key} = {target!r} is neither a function nor a class; give `def {name}(media, prompts)` of a module, or a class "
            "with a method `score(media, prompts)`"
        )
    path = f"{target.__module__}:{target.__qualname__}"
    remedy = f"workers import it by name: move it to the top level of a module, e.g. my_rewards.py, and `from my_rewards import {name}`"
    if "<" in target.__qualname__:
        what = "a lambda" if target.__name__ == "<lambda>" else "defined inside a function"
        raise ConfigError(f"{key} = {target.__qualname__} is {what}; {remedy}")
    if target.__module__ == "__main__":
        raise ConfigError(f"{key} = {path} is defined in the script or notebook itself; {remedy}")
    if load_object(path, group=_GROUP, key=key) is not target:
        raise ConfigError(f"{key}: importing {path} gives another object (a decorated or redefined one); {remedy}")
    if not _is_found_by_others(target.__module__):
        raise ConfigError(
            f"{key} = {path}: this process finds the module by a search path of its own, which worker processes do not have; "
            f"start from the folder with it, put that folder into PYTHONPATH, or install it"
        )
    return path


def _is_found_by_others(module: str) -> bool:
    """Whether a new interpreter finds it, which searches the current folder and, as Ray's workers do, the script's."""
    search = "import sys; from importlib.util import find_spec; sys.path += sys.argv[2:]; sys.exit(not find_spec(sys.argv[1]))"
    script = Path(sys.argv[0]).resolve().parent
    done = subprocess.run([sys.executable, "-c", search, module.partition(".")[0], str(script)], check=False)
    return done.returncode == 0
