"""The velocity of a batch with both sides of its guidance."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from verst.engine.resolve import Resolved
from verst.families import Components
from verst.flow.guidance import in_two_passes
from verst.types import Conditioning, Latents


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """How the two sides of one batch are made and combined."""

    scale: float
    two_passes: bool
    """One forward for each side, whatever the family does by itself."""

    @classmethod
    def of(cls, job: Resolved) -> Guidance:
        return cls(scale=job.guidance_scale, two_passes=job.guided and job.request.guidance_passes == "two")


def guided_velocity(
    components: Components, x: Latents, sigmas: dict[str, Tensor], conditioning: Conditioning, guidance: Guidance
) -> Latents:
    """stream -> [B, ...] fp32, by the family's one forward."""
    family = components.family

    def forward(rows: Conditioning, scale: float) -> Latents:
        return family.velocity(components.transformer, x, sigmas, rows, guidance_scale=scale)

    if guidance.two_passes:
        return in_two_passes(lambda rows: forward(rows, family.unguided_scale), conditioning, guidance.scale)
    return forward(conditioning, guidance.scale)
