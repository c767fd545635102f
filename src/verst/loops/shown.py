"""What of a rollout and an evaluation people see: records for the report, without tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verst.config.recipe import RlRecipe
from verst.loops.batch import reward_weights
from verst.obs.samples import ShownSample
from verst.rollout.filters import weighted_sums
from verst.rollout.pipeline import ScoredMicrogroup, in_prompt_order
from verst.rollout.prompts import Prompt
from verst.types import Group, Sample


@dataclass(frozen=True, kw_only=True)
class SeenGroup:
    """One group and what came of it."""

    prompt: str
    rewards: list[float]
    """Weighted sum of each sample; NaN where masked."""
    by_reward: dict[str, tuple[float, ...]]
    dropped_by: str | None
    """The filter that refused it."""
    samples: tuple[Sample, ...]

    def extremes(self, number: int) -> list[ShownSample]:
        """Its best and its worst sample, the first of equal ones; none where nothing is decoded or scored."""
        scored = [i for i, reward in enumerate(self.rewards) if math.isfinite(reward) and len(self.samples[i].media)]
        if not scored:
            return []
        reward = self.rewards.__getitem__
        return [
            shown(
                self.samples[i],
                reward=self.rewards[i],
                rewards={name: values[i] for name, values in self.by_reward.items()},
                place={"rank": rank, "group": number, "index": self.samples[i].key.index},
            )
            for rank, i in (("best", max(scored, key=reward)), ("worst", min(scored, key=reward)))
        ]


def seen_groups(recipe: RlRecipe, groups: Sequence[Group], dropped_by: Sequence[str | None]) -> list[SeenGroup]:
    weights = reward_weights(recipe)
    found = []
    for group, dropped in zip(groups, dropped_by, strict=True):
        by_reward = group.rewards()
        found.append(
            SeenGroup(
                prompt=group.prompt,
                rewards=weighted_sums(by_reward, weights),
                by_reward=by_reward,
                dropped_by=dropped,
                samples=group.samples,
            )
        )
    return found


def heldout_samples(
    recipe: RlRecipe, prompts: Sequence[Prompt], scored: Sequence[ScoredMicrogroup]
) -> list[ShownSample]:
    """The first `eval.grid` of an evaluation, in the prompts' order."""
    weights = reward_weights(recipe)
    makers = []
    for item in scored:
        by_reward = item.scores.by_reward
        totals = weighted_sums(by_reward, weights)
        for i, sample in enumerate(item.microgroup.samples):
            rewards = {name: values[i] for name, values in by_reward.items()}
            makers.append(functools.partial(shown, sample, reward=totals[i], rewards=rewards))
    ordered = in_prompt_order(scored, makers)[: recipe.eval.num_pictures]
    return [make(prompt=prompt.text) for make, prompt in zip(ordered, prompts, strict=False)]


def shown(
    sample: Sample,
    *,
    reward: float,
    rewards: Mapping[str, float],
    prompt: str | None = None,
    place: Mapping[str, Any] | None = None,
) -> ShownSample:
    """prompt: unset = as the engine was asked."""
    return ShownSample(
        media=sample.media.numpy(),
        prompt=sample.prompt if prompt is None else prompt,
        seed=sample.seed,
        reward=reward,
        rewards=rewards,
        place=place or {},
        fps=sample.fps,
        audio=None if sample.audio is None else sample.audio.numpy(),
        sample_rate=sample.sample_rate,
    )
