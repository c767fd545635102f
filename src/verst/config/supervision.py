"""What a run does about processes that end or hang."""

from __future__ import annotations

from pydantic import model_validator

from verst.config.basis import Flag, PositiveFloat, PositiveInt, Section
from verst.errors import ConfigError


class SupervisionConfig(Section):
    """Limits are times without progress, not of answers: a long denoising that goes on step by step reaches none."""

    enabled: Flag = True
    """Bring back what ends or hangs, and go on. Off: the first such process ends the run."""
    restarts: PositiveInt = 3
    """Times that one process may come back within `window_s`; the next fault ends the run with its diagnosis."""
    window_s: PositiveFloat = 3600.0
    """Seconds."""
    poll_s: PositiveFloat = 2.0
    """Seconds between two looks at progress."""
    engine_s: PositiveFloat = 300.0
    """Longest that an engine with work may be without progress: one denoising step, one encoding, one decoding, one taking of weights."""
    trainer_s: PositiveFloat = 1800.0
    """The same of the trainer: one tile, one optimizer step, one writing of a checkpoint, one loading of the model."""
    parser_s: PositiveFloat = 300.0
    """The same of a parser: one answer. For rewards `rewards.timeout_s` says it: two attempts without an end."""
    router_s: PositiveFloat = 60.0
    """Longest that the router may answer nothing while samples are asked for through it."""
    start_s: PositiveFloat = 600.0
    """Longest that an engine, a router, a parser or a reward worker may take until it is ready, with all that it loads; and a trainer rank until it is there (its loading of the model counts in trainer_s)."""

    @model_validator(mode="after")
    def _looks_often_enough(self) -> SupervisionConfig:
        for name in ("engine_s", "trainer_s", "parser_s", "router_s"):
            limit = getattr(self, name)
            if limit < 2 * self.poll_s:
                raise ConfigError(
                    f"supervision.{name} = {limit:g} is less than two looks at progress, supervision.poll_s = "
                    f"{self.poll_s:g} apart; use at least {2 * self.poll_s:g}, or a smaller poll_s"
                )
        return self
