"""Rewards: one file each, one protocol. A new one is a file, a config class in `config/sections.py` and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verst.config.sections import RewardConfig
from verst.rewards import ocr
from verst.rewards.base import Reward
from verst.rewards.brightness import Brightness
from verst.rewards.custom import Custom
from verst.rewards.jpeg_size import JpegSize

__all__ = ["PROMPT_CHECKS", "REWARDS", "Reward", "make_reward", "prompt_problems"]

REWARDS: dict[str, Callable[[Any], Reward]] = {
    "ocr": ocr.Ocr,
    "jpeg_size": JpegSize,
    "brightness": Brightness,
    "custom": Custom,
}
"""Recipe type -> class, made from its config section."""

PROMPT_CHECKS: dict[str, Callable[[Any, Sequence[str]], list[str]]] = {"ocr": ocr.prompt_problems}
"""Recipe type -> what it needs of prompts, for those that need something."""


def make_reward(config: RewardConfig) -> Reward:
    """The reward of one [[rewards]] table, its model loaded. Raises ConfigError or RewardError."""
    return REWARDS[config.type](config)


def prompt_problems(config: RewardConfig, prompts: Sequence[str]) -> list[str]:
    """One line for each prompt that this reward could not score; loads no model."""
    check = PROMPT_CHECKS.get(config.type)
    return check(config, prompts) if check else []
