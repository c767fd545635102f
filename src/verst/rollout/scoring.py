"""Scores of microgroups: what rewards see, which of them apply, and when those that compare a group are called.

microgroup ─> rewards of samples ─────────────────────────────────┐
           └> (last of its group) ─> rewards of groups, ranks ────┴─> scores of this microgroup
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from verst.config.rewards import RewardConfig, is_group_wise, reward_name
from verst.errors import EngineError
from verst.rewards.base import RewardBatch
from verst.rewards.calls import CallResult, combine
from verst.rewards.pool import RewardPool
from verst.rollout.plan import MicrogroupTask
from verst.types import Microgroup, Sample, Scores, stack_rows

Results = dict[str, CallResult]
"""reward name -> what it said."""


@dataclass(kw_only=True)
class _OpenGroup:
    """What is there of a group whose samples come one microgroup after the other."""

    parts: dict[int, tuple[RewardBatch, Results]] = field(default_factory=dict)
    """index of the first sample -> the microgroup, and what rewards of samples said."""
    whole: asyncio.Future[Results]
    """What rewards of groups said, ranks included, of all samples by index."""


class Scorer:
    """Scores microgroups by one set of rewards.

    Rewards of samples are called at once. Rewards that compare the samples of a group (and ranks) wait for the last
    microgroup of it; only scoring waits, engines do not. Held-out samples have no group: such rewards give them no
    score, and ranks stay scores.
    """

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        pools: Sequence[RewardPool],
        *,
        group_size: int,
        always: Collection[str] = (),
    ) -> None:
        """pools: at least those of `configs`. group_size: samples of a complete group.

        always: names of rewards that score every sample, whatever its row says.
        """
        self._always = frozenset(always)
        self._configs = {reward_name(config): config for config in configs}
        self._pools = {pool.name: pool for pool in pools}
        self._group_size = group_size
        self._latents = any(config.sees_latents for config in configs)
        self._open: dict[tuple[int, int], _OpenGroup] = {}

    async def __call__(self, task: MicrogroupTask, microgroup: Microgroup) -> Scores:
        """Every reward that applies, side by side, each with its own attempts and policy. Raises RewardError."""
        batch = reward_batch(task, microgroup, latents=self._latents)
        chosen = self._applying(task)
        results = await self._all([name for name in chosen if not is_group_wise(self._configs[name])], batch)
        waits = [n for n in chosen if is_group_wise(self._configs[n]) or self._configs[n].rank]
        if waits and not task.is_heldout:
            results |= await self._in_group(task, batch, results, waits)
        return combine({name: results[name] for name in chosen if name in results})

    def _applying(self, task: MicrogroupTask) -> list[str]:
        """Names of the rewards of these samples, in the recipe's order: all, unless their row names some."""
        if task.rewards is None:
            return list(self._configs)
        return [name for name in self._configs if name in task.rewards or name in self._always]

    async def _all(self, names: Sequence[str], batch: RewardBatch) -> Results:
        values = await asyncio.gather(*(self._pools[name].score(batch) for name in names))
        return dict(zip(names, values, strict=True))

    async def _in_group(
        self, task: MicrogroupTask, batch: RewardBatch, results: Results, names: Sequence[str]
    ) -> Results:
        place = (task.rollout, task.group)
        if place not in self._open:
            self._open[place] = _OpenGroup(whole=asyncio.get_running_loop().create_future())
        group = self._open[place]
        start = task.keys[0].index
        group.parts[start] = (batch, results)
        try:
            if sum(len(part) for part, _ in group.parts.values()) >= self._group_size:
                await self._close(group, names)
            whole = await asyncio.shield(group.whole)
        finally:
            # Complete, failed or cancelled: what comes later under this number is another group.
            if self._open.get(place) is group:
                del self._open[place]
        return {name: result.part(start, start + len(batch)) for name, result in whole.items()}

    async def _close(self, group: _OpenGroup, names: Sequence[str]) -> None:
        """The last microgroup is there: call what compares the group, and rank."""
        try:
            parts = [group.parts[start] for start in sorted(group.parts)]
            whole = await self._all([n for n in names if is_group_wise(self._configs[n])], _joined(parts))
            for name in names:
                if name not in whole:
                    whole[name] = _end_to_end([results[name] for _, results in parts])
                if self._configs[name].rank:
                    whole[name] = ranked(whole[name])
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                group.whole.cancel()
            else:
                group.whole.set_exception(error)
                group.whole.exception()  # asyncio complains about one that nobody has looked at, and there may be nobody
            raise
        group.whole.set_result(whole)


def ranked(result: CallResult) -> CallResult:
    """Ranks in place of scores, in [0, 1], larger is better; equal scores share the mean rank; NaN stays NaN.

    A single finite score is 0.5.
    """
    finite = sorted(value for value in result.values if math.isfinite(value))
    last = len(finite) - 1
    first = {value: finite.index(value) for value in finite}

    def rank(value: float) -> float:
        if not math.isfinite(value):
            return math.nan
        return (first[value] + (finite.count(value) - 1) / 2) / last if last else 0.5

    values = tuple(rank(value) for value in result.values)
    return CallResult(values=values, num_attempts=result.num_attempts, failed=result.failed)


def reward_batch(task: MicrogroupTask, microgroup: Microgroup, *, latents: bool = False) -> RewardBatch:
    """The samples of one microgroup, with their final latents if asked for.

    Raises RewardError for media that no reward takes, EngineError for mixed ones and for latents that are not there.
    """
    samples = microgroup.samples
    first = samples[0]
    for sample in samples[1:]:
        if (sample.fps, sample.sample_rate, sample.media.shape) != (first.fps, first.sample_rate, first.media.shape):
            raise EngineError("the samples of one request came back with unlike sizes or rates")
    audio = [sample.audio for sample in samples if sample.audio is not None]
    return RewardBatch(
        media=stack_rows([sample.media for sample in samples]),
        prompts=task.prompts,
        metadata=task.metadata,
        fps=first.fps,
        audio=stack_rows(audio) if audio else None,
        sample_rate=first.sample_rate,
        latents=final_latents(samples) if latents else None,
    )


def final_latents(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """stream -> fp32 [B, ...], x0 as the model denoised it. Raises EngineError where it is not there, or packed."""
    by_stream: dict[str, torch.Tensor] = {}
    for name in samples[0].streams:
        paths = [sample.streams[name] for sample in samples]
        try:
            finals = [path.latent_at(len(path.sigmas) - 1) for path in paths]
        except KeyError as error:
            raise EngineError(
                f"a reward reads final latents, the engine sent none of stream {name}: {error}"
            ) from error
        if len({tuple(x.shape) for x in finals}) > 1:
            raise EngineError(f"the samples of one request came back with unlike latents in stream {name}")
        by_stream[name] = stack_rows(finals).float()
    visual = by_stream.get("visual")
    if visual is None or visual.ndim not in (4, 5):
        shape = "none" if visual is None else f"{list(visual.shape[1:])}"
        raise EngineError(
            "a reward reads final latents, which come as [C, H, W] or [C, F, H, W] in stream visual; the engine sent "
            f"{shape}: tokens that are packed cannot be scored"
        )
    return by_stream


def _joined(parts: Sequence[tuple[RewardBatch, Results]]) -> RewardBatch:
    return RewardBatch.join([batch for batch, _ in parts])


def _end_to_end(results: Sequence[CallResult]) -> CallResult:
    failed, start = [], 0
    for result in results:
        failed += [start + row for row in result.failed]
        start += len(result.values)
    return CallResult(
        values=tuple(value for result in results for value in result.values),
        num_attempts=max(result.num_attempts for result in results),
        failed=tuple(failed),
    )
