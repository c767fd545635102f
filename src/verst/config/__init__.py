"""The recipe: what a run does, in one TOML file. Imports no torch."""

from verst.config.load import load_recipe, missing_files, parse_recipe
from verst.config.recipe import Recipe, RlRecipe, SftRecipe, reward_name

__all__ = ["Recipe", "RlRecipe", "SftRecipe", "load_recipe", "missing_files", "parse_recipe", "reward_name"]
