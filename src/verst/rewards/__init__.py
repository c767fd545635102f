"""Rewards: one file each, one protocol. A new one is a file, a config class in `config/rewards.py` and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verst.config.rewards import HttpReward, ImageRewardBase, RewardConfig
from verst.rewards.aesthetic import Aesthetic
from verst.rewards.av_sync import AvSync
from verst.rewards.base import Reward, RewardBatch
from verst.rewards.brightness import Brightness
from verst.rewards.clap import Clap
from verst.rewards.clip_score import ClipScore
from verst.rewards.contrast import Contrast
from verst.rewards.diversity import Diversity
from verst.rewards.frames import FrameWise
from verst.rewards.geneval import GenEval
from verst.rewards.hps_v2 import HpsV2
from verst.rewards.hps_v3 import HpsV3
from verst.rewards.http import Http
from verst.rewards.image_reward import ImageReward
from verst.rewards.jpeg_size import JpegSize
from verst.rewards.ocr import Ocr
from verst.rewards.pick_score import PickScore
from verst.rewards.python import Python
from verst.rewards.sharpness import Sharpness
from verst.rewards.vision_judge import VisionJudge

__all__ = ["REWARDS", "Reward", "RewardBatch", "make_reward"]

REWARDS: dict[str, Callable[[Any], Reward]] = {
    "ocr": Ocr,
    "jpeg_size": JpegSize,
    "brightness": Brightness,
    "sharpness": Sharpness,
    "contrast": Contrast,
    "diversity": Diversity,
    "http": Http,
    "openai": VisionJudge,
    "python": Python,
    "latent": Python,
    "clip_score": ClipScore,
    "pick_score": PickScore,
    "hps_v2": HpsV2,
    "hps_v3": HpsV3,
    "image_reward": ImageReward,
    "aesthetic": Aesthetic,
    "geneval": GenEval,
    "clap": Clap,
    "av_sync": AvSync,
}
"""Recipe type -> class, made from its config section."""


def make_reward(config: RewardConfig) -> Reward:
    """The reward of one [[rewards]] table, its model loaded. Raises ConfigError or RewardError."""
    reward = REWARDS[config.type](config)
    if isinstance(config, ImageRewardBase | HttpReward) and config.frames is not None:
        return FrameWise(reward, config.frames)
    return reward
