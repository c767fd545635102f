"""Where trainer ranks and engines stand: which nodes, which GPUs, and who shares one with whom."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verst.config.basis import Section
from verst.errors import ConfigError

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]
"""Ray's: few nodes, one node, many nodes, another node for each."""


class FreePlacement(Section):
    """Ray puts each process where there is room; a trainer rank and an engine ask for half a GPU each."""

    type: Literal["free"] = "free"


class ColocatedPlacement(Section):
    """Engine i stands on the GPU of trainer rank i; without GPUs, on its node."""

    type: Literal["colocated"] = "colocated"
    strategy: Strategy = "PACK"
    """How the pairs are laid out over nodes."""


class SeparatePlacement(Section):
    """A GPU for each trainer rank and for each engine."""

    type: Literal["separate"] = "separate"
    trainer_strategy: Strategy = "PACK"
    """How trainer ranks are laid out over nodes: they talk most."""
    engine_strategy: Strategy = "PACK"
    """How engines are."""
    trainer_nodes: str | None = None
    """Only on nodes that were started with this custom resource (`ray start --resources='{"trainer": 1}'`)."""
    engine_nodes: str | None = None
    """The same for engines."""


PlacementConfig = Annotated[FreePlacement | ColocatedPlacement | SeparatePlacement, Field(discriminator="type")]


def check_placement(
    placement: FreePlacement | ColocatedPlacement | SeparatePlacement, *, ranks: int, engines: int
) -> None:
    """Raises ConfigError where the numbers of processes do not suit it."""
    if isinstance(placement, ColocatedPlacement) and ranks != engines:
        raise ConfigError(
            f"cluster.placement.type = colocated puts engine i beside trainer rank i, but engine.num = {engines} and "
            f"trainer.ranks = {ranks}; use engine.num = {ranks}, or cluster.placement.type = separate"
        )
