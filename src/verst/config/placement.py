"""Where trainer ranks and engines stand: which nodes, which GPUs, and who shares one with whom."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verst.config.basis import Flag, Section
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
    share_base: Flag = False
    """The frozen weights under a LoRA are held once on each device: every rank keeps them whole, and its engine computes with the same memory."""


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


class SleepConfig(Section):
    """What colocated processes give back to each other while it is the other's turn."""

    engine: Literal["off", "host", "drop"] = "off"
    """While the trainer trains. host: an engine's weights wait in (pinned) host memory; drop: the transformer's are given up, for the next sync brings all of them (full fine-tuning)."""
    trainer: Flag = False
    """After an update a rank gives the GPU memory back that torch keeps for its next one. trainer.offload keeps optimizer state off the GPU altogether."""

    def check(self, placement: str, *, staleness: int, finetune: str) -> None:
        """Raises ConfigError. placement: cluster.placement.type; staleness: of [schedule]; finetune: model.finetune.type."""
        if self.engine != "off" and placement == "separate":
            raise ConfigError(
                f"cluster.sleep.engine = {self.engine} with cluster.placement.type = separate frees GPUs that nobody else "
                "uses; use off, or placement colocated"
            )
        if self.engine != "off" and staleness:
            raise ConfigError(
                f"cluster.sleep.engine = {self.engine}, but with schedule.staleness = {staleness} engines sample while the "
                "trainer trains; use off, or schedule.type = sync"
            )
        if self.engine == "drop" and finetune != "full":
            raise ConfigError(
                f"cluster.sleep.engine = drop gives up weights that a sync with model.finetune.type = {finetune} does not "
                "bring; use host"
            )


def check_placement(
    placement: FreePlacement | ColocatedPlacement | SeparatePlacement,
    *,
    ranks: int,
    engines: int,
    finetune: str,
    lora_form: str,
    offloads: bool,
    per_engine: int,
    tensor: int,
) -> None:
    """Raises ConfigError where the numbers of processes, or what is trained and sent, do not suit it.

    finetune: model.finetune.type. lora_form: sync.lora. offloads: trainer.offload.parameters.
    per_engine: ranks of each engine. tensor: trainer.parallel.tensor.
    """
    if not isinstance(placement, ColocatedPlacement):
        return
    if per_engine > 1:
        raise ConfigError(
            f"cluster.placement.type = colocated gives each engine the weights of the trainer rank beside it, and with "
            f"engine.parallel an engine stands at {per_engine} places; use cluster.placement.type = separate"
        )
    if ranks != engines:
        raise ConfigError(
            f"cluster.placement.type = colocated puts engine i beside trainer rank i, but engine.num = {engines} and "
            f"trainer.ranks = {ranks}; use engine.num = {ranks}, or cluster.placement.type = separate"
        )
    if placement.share_base and finetune != "lora":
        raise ConfigError(
            f"cluster.placement.share_base = true shares the frozen weights under a LoRA, and model.finetune.type = "
            f"{finetune} freezes none; use model.finetune.type = lora, or cluster.placement.share_base = false"
        )
    if placement.share_base and lora_form != "pairs":
        raise ConfigError(
            f"sync.lora = {lora_form} writes into the engine's base weights, which with cluster.placement.share_base = true "
            "are the trainer's own; use sync.lora = pairs"
        )
    if placement.share_base and offloads:
        raise ConfigError(
            "trainer.offload.parameters = true keeps the base in host memory, and cluster.placement.share_base = true lends "
            "it to the engine where both compute; use one of them"
        )
    if placement.share_base and tensor > 1:
        raise ConfigError(
            f"trainer.parallel.tensor = {tensor} cuts the layers that cluster.placement.share_base = true lends whole; use "
            "one of them"
        )
