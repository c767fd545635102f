"""The guided velocity of one batch, by the family's one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
    components: Components,
    x: Latents,
    sigmas: dict[str, Tensor],
    conditioning: Conditioning,
    guidance: Guidance,
    *,
    as_trained: bool = False,
) -> Latents:
    """stream -> [B, ...] fp32, by the family's one forward.

    as_trained: as a trainer's forward, which keeps what its backward needs; compiled blocks then are the same programs.
    """
    family = components.family

    def forward(rows: Conditioning, scale: float) -> Latents:
        return family.velocity(components.transformer, x, sigmas, rows, guidance_scale=scale)

    with torch.set_grad_enabled(as_trained):
        if guidance.two_passes:
            v = in_two_passes(
                lambda rows: forward(rows, family.unguided_scale),
                conditioning,
                guidance.scale,
                negative_gradient=False,
            )
        else:
            v = forward(conditioning, guidance.scale)
    return {name: value.detach() for name, value in v.items()}
