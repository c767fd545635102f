"""Rewards in this process, one thread a call: for supervised runs, evaluation of a checkpoint, and tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from verst.config.rewards import RewardConfig
from verst.rewards import make_reward
from verst.rewards.base import RewardBatch, Score
from verst.rewards.calls import Call, combine
from verst.rewards.pool import RewardPool
from verst.types import Scores


def local_pools(configs: Sequence[RewardConfig]) -> list[RewardPool]:
    """Loads every reward: one worker each. Raises ConfigError or RewardError."""
    return [
        RewardPool(config.model_copy(update={"workers": 1}), _in_thread(config), deterministic=True)
        for config in configs
    ]


class LocalRewards:
    """The rewards of a recipe, each with its policy; a call that ran out of time goes on in its thread, unread."""

    def __init__(self, configs: Sequence[RewardConfig]) -> None:
        """Loads every reward. Raises ConfigError or RewardError."""
        self._pools = local_pools(configs)

    async def score(self, batch: RewardBatch) -> Scores:
        """Raises RewardError after a final failure under "stop"."""
        return combine({pool.name: await pool.score(batch) for pool in self._pools})


def _in_thread(config: RewardConfig) -> Call:
    reward = make_reward(config)

    async def call(batch: RewardBatch) -> Sequence[Score]:
        return await asyncio.to_thread(reward.score, batch)

    return call
