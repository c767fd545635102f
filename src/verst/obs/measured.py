"""What a run's stages take by its spans, as the input of a simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from verst.errors import ConfigError
from verst.obs.spans import ENGINE, PARSER, TRAINER, Span
from verst.obs.stage_times import covered_s, is_work


@dataclass(frozen=True, kw_only=True)
class RewardTimes:
    call_s: float
    """Of a call, whatever is in it."""
    sample_s: float
    """And of each sample in it."""
    failure_rate: float
    """Of one sample in one call, by how many were asked about again."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Means over the rollouts and iterations that were looked at; seconds."""

    generate_s: float
    """That an engine works for one microgroup; its share where several are one batch."""
    transfer_s: float
    parse_s: float
    rewards: Mapping[str, RewardTimes] = field(default_factory=dict)
    train_s: float
    sync_s: float


def measure(spans: Sequence[Span]) -> Measured:
    """Leaves out the first rollout where there are others: it bears what happens once. Raises ConfigError for spans of
    no rollout."""
    rollouts = {span.rollout for span in spans if span.rollout is not None and span.rollout >= 0}
    counted = rollouts - {min(rollouts)} if len(rollouts) > 1 else rollouts
    of_rollouts = [span for span in spans if span.rollout in counted]
    requests = [span for span in of_rollouts if span.name == "request"]
    if not requests:
        raise ConfigError("there are no spans of a rollout in this run: was it sampled, and by this version of verst?")
    work = [span for span in of_rollouts if is_work(span.name, span.more)]
    samples = sum(int(span.more.get("samples") or 0) for span in requests)
    calls = defaultdict(list)
    for span in of_rollouts:
        if span.name == "score":
            calls[str(span.more["reward"])].append(span)
    phases = [span for span in spans if span.iteration is not None and span.iteration > (1 if len(rollouts) > 1 else 0)]
    return Measured(
        generate_s=_busy_s(work, ENGINE) / len(requests),
        transfer_s=_mean(span.seconds for span in of_rollouts if span.name == "transfer"),
        parse_s=_busy_s(work, PARSER) / len(requests),
        rewards={name: _reward_times(found, samples) for name, found in calls.items()},
        train_s=_mean(span.seconds for span in phases if span.kind == TRAINER),
        sync_s=_mean(span.seconds for span in phases if span.name == "sync"),
    )


def _busy_s(work: Iterable[Span], kind: str) -> float:
    """Seconds that all lanes of a kind worked."""
    lanes = defaultdict(list)
    for span in work:
        if span.kind == kind:
            lanes[span.lane].append((span.start_s, span.end_s))
    return sum(map(covered_s, lanes.values()))


def _reward_times(calls: Sequence[Span], samples: int) -> RewardTimes:
    """By the line through (samples of a call, its seconds) that fits best; through 0 where that tells nothing."""
    sizes = [int(span.more.get("samples") or 1) for span in calls]
    seconds = [span.seconds for span in calls]
    asked, total = sum(sizes), sum(seconds)
    size, second = asked / len(calls), total / len(calls)
    spread = sum((n - size) ** 2 for n in sizes)
    slope = sum((n - size) * (s - second) for n, s in zip(sizes, seconds, strict=True)) / spread if spread else 0.0
    failure_rate = max(0.0, 1 - samples / asked)
    if 0 < slope <= second / size:
        return RewardTimes(call_s=second - slope * size, sample_s=slope, failure_rate=failure_rate)
    return RewardTimes(call_s=0.0, sample_s=total / asked, failure_rate=failure_rate)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
