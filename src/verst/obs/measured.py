"""What a run's stages take by its spans, as the input of a simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from verst.errors import ConfigError
from verst.obs.spans import ENGINE, PARSER, TRAINER, Span
from verst.obs.stage_times import covered_s, is_work

Piece = tuple[str | None, float, float]
"""Lane, start, end."""


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
    of_rollouts, leaves_one_out = counted(spans)
    requests = [span for span in of_rollouts if span.name == "request"]
    if not requests:
        raise ConfigError("there are no spans of a rollout in this run: was it sampled, and by this version of verst?")
    work = [span for span in of_rollouts if is_work(span.name, span.more)]
    samples = sum(int(span.more.get("samples") or 0) for span in requests)
    calls = defaultdict(list)
    for span in of_rollouts:
        if span.name == "score":
            calls[str(span.more["reward"])].append(span)
    phases = [span for span in spans if span.iteration is not None and span.iteration > int(leaves_one_out)]
    return Measured(
        generate_s=covered_by_lane(pieces(s for s in work if s.kind == ENGINE)) / len(requests),
        transfer_s=mean(span.seconds for span in of_rollouts if span.name == "transfer"),
        parse_s=covered_by_lane(pieces(s for s in work if s.kind == PARSER)) / len(requests),
        rewards={name: _reward_times(found, samples) for name, found in calls.items()},
        train_s=mean(span.seconds for span in phases if span.kind == TRAINER),
        sync_s=mean(span.seconds for span in phases if span.name == "sync"),
    )


def counted(spans: Sequence[Span]) -> tuple[list[Span], bool]:
    """Those of rollouts that are looked at, and whether there is another one, the first, which is not."""
    rollouts = {span.rollout for span in spans if span.rollout is not None and span.rollout >= 0}
    several = len(rollouts) > 1
    chosen = rollouts - {min(rollouts)} if several else rollouts
    return [span for span in spans if span.rollout in chosen], several


def pieces(work: Iterable[Span]) -> Iterator[Piece]:
    for span in work:
        yield span.lane, span.start_s, span.end_s


def covered_by_lane(work: Iterable[Piece]) -> float:
    """Seconds in which lanes were at work, summed over lanes."""
    lanes: dict[str | None, list[tuple[float, float]]] = defaultdict(list)
    for lane, start_s, end_s in work:
        lanes[lane].append((start_s, end_s))
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


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
