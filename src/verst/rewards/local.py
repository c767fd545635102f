"""Rewards in this process, one thread a call: for supervised runs, evaluation of a checkpoint, and tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from verst.config.rewards import RewardConfig
from verst.rewards import make_reward
from verst.rewards.base import Reward, RewardBatch, Score
from verst.rewards.calls import Call, combine, score_with_policy
from verst.types import Scores


class LocalRewards:
    """The rewards of a recipe, each with its policy; a call that ran out of time goes on in its thread, unread."""

    def __init__(self, configs: Sequence[RewardConfig]) -> None:
        """Loads every reward. Raises ConfigError or RewardError."""
        self._rewards: list[tuple[RewardConfig, Reward]] = [(config, make_reward(config)) for config in configs]

    async def score(self, batch: RewardBatch) -> Scores:
        """Raises RewardError after a final failure under "stop"."""
        results = {}
        for config, reward in self._rewards:
            results[reward.name] = await score_with_policy(
                _in_thread(reward),
                batch,
                name=reward.name,
                attempts=config.attempts,
                timeout_s=config.timeout_s,
                on_failure=config.on_failure,
            )
        return combine(results)


def _in_thread(reward: Reward) -> Call:
    async def call(batch: RewardBatch) -> Sequence[Score]:
        return await asyncio.to_thread(reward.score, batch)

    return call
