"""What a recipe brings along, imported or refused before any process starts."""

from __future__ import annotations

from verst.algorithms import make_algorithm
from verst.config.plugins import load_object
from verst.config.recipe import RlRecipe
from verst.config.rewards import OwnReward
from verst.config.sections import SglangEngine
from verst.engine.sglang.process import check_executable
from verst.rewards.python import ENTRY_POINTS


def check_own_code(recipe: RlRecipe) -> None:
    """Raises ConfigError for an algorithm, a reward or an engine's command that cannot be had.

    Rewards are imported and not made: one may load a model, for which its worker has the memory.
    """
    make_algorithm(recipe.algorithm, sampling=recipe.sampling, seed=recipe.run.seed)
    engine = recipe.engine
    if isinstance(engine, SglangEngine) and not engine.urls and recipe.cluster.address is None:
        check_executable(engine.executable)
    for key, rewards in (("rewards", recipe.rewards), ("watch.gold", recipe.watch.gold)):
        for index, reward in enumerate(rewards):
            if isinstance(reward, OwnReward):
                load_object(reward.path, group=ENTRY_POINTS, key=f"{key}.{index}.path")
