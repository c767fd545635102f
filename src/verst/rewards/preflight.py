"""What rewards need, asked before anything is loaded: settings and files, and a prompt file that they can judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verst.config.rewards import RewardConfig, reward_name
from verst.errors import ConfigError, PromptError
from verst.rewards import aesthetic, clap, clip, geneval, hps_v2, hps_v3, http, image_reward, ocr, vision_judge

NEEDS: dict[str, Callable[[Any], list[str]]] = {
    "http": http.needs,
    "openai": vision_judge.needs,
    "clip_score": clip.needs,
    "pick_score": clip.needs,
    "hps_v2": hps_v2.needs,
    "hps_v3": hps_v3.needs,
    "image_reward": image_reward.needs,
    "aesthetic": aesthetic.needs,
    "geneval": geneval.needs,
    "clap": clap.needs,
}
"""Recipe type -> one line for each file, setting or package that is missing, for those that need some."""
PROMPT_CHECKS: dict[str, Callable[[Any, Sequence[str], Sequence[Mapping[str, Any]]], list[str]]] = {
    "ocr": ocr.prompt_problems,
    "clip_score": clip.prompt_problems,
    "pick_score": clip.prompt_problems,
    "hps_v2": clip.prompt_problems,
    "image_reward": image_reward.prompt_problems,
    "geneval": geneval.prompt_problems,
    "clap": clap.prompt_problems,
}
"""Recipe type -> one line for each prompt (and its row's other columns) that it could not score."""


def check_rewards(
    configs: Sequence[RewardConfig], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> None:
    """Loads no model. Raises ConfigError for what is missing, PromptError for prompts that cannot be scored."""
    missing = [f"reward {reward_name(c)}: {line}" for c in configs if c.type in NEEDS for line in NEEDS[c.type](c)]
    if missing:
        raise ConfigError("; ".join(missing))
    problems = [
        line for c in configs if c.type in PROMPT_CHECKS for line in PROMPT_CHECKS[c.type](c, prompts, metadata)
    ]
    if problems:
        raise PromptError(f"{len(problems)} prompts cannot be scored: {'; '.join(problems[:3])}")
