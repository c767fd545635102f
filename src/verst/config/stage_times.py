"""What the stages of a run take: the input of `verst plan --simulate`, measured from a run or written down."""

from __future__ import annotations

from verst.config.basis import NonNegativeFloat, PositiveFloat, Section, UnitFloat


class RewardStageTimes(Section):
    call_s: NonNegativeFloat = 0.0
    """Seconds of one call, whatever is in it."""
    sample_s: NonNegativeFloat
    """Seconds of each sample in a call."""
    failure_rate: UnitFloat = 0.0
    """Share of samples that one call gives no score."""


class StageTimes(Section):
    generate_s: PositiveFloat
    """Seconds that one engine works for one microgroup."""
    transfer_s: NonNegativeFloat = 0.0
    """Seconds from an engine's end to the whole answer being in the driver."""
    parse_s: NonNegativeFloat = 0.0
    """Seconds of a parser for one microgroup."""
    rewards: dict[str, RewardStageTimes]
    """Name of each of the recipe's rewards -> its times."""
    train_s: NonNegativeFloat
    """Seconds of all optimizer steps of one rollout, by the recipe's `trainer.ranks`."""
    sync_s: NonNegativeFloat = 0.0
    """Seconds of one weight hand-off."""
    pass_rate: PositiveFloat = 1.0
    """Share of groups that pass the filters; only read with `rollout.dynamic`."""
