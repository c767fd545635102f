"""The guided velocity as a trainer computes it: the engine's own, with gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verst.config.sections import SamplingConfig
from verst.errors import ConfigError
from verst.families.base import Family, OwnGuidance
from verst.flow.guidance import in_two_passes
from verst.types import Conditioning, Latents


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One forward of the policy, whoever's weights it is made with."""

    family: Family
    guidance_scale: float
    dtype: torch.dtype
    """Of the forward; parameters may be kept in another one."""
    two_passes: bool = False
    """Each side of the guided velocity is a forward of its own."""
    negative_gradient: bool = True
    """Of these: gradients flow through the unconditional one as well (`sampling.guidance_gradient`)."""

    @classmethod
    def of(cls, sampling: SamplingConfig, family: Family, dtype: torch.dtype, *, two_passes: bool) -> Forward:
        """Raises ConfigError for a family whose two sides nobody else can combine."""
        conditional = sampling.guidance_gradient == "conditional"
        if conditional and (family.unguided_scale != 1 or isinstance(family, OwnGuidance)):
            raise ConfigError(
                f"sampling.guidance_gradient = conditional: {family.name} guides by a formula of its own, in one forward; "
                "use both"
            )
        return cls(
            family=family,
            guidance_scale=sampling.guidance_scale,
            dtype=dtype,
            two_passes=two_passes,
            negative_gradient=not conditional,
        )

    def __call__(
        self, module: nn.Module, latents: Latents, sigmas: dict[str, Tensor], conditioning: Conditioning
    ) -> Latents:
        """stream -> [B, ...] fp32."""

        def velocity(rows: Conditioning, scale: float) -> Latents:
            return self.family.velocity(module, latents, sigmas, rows, guidance_scale=scale, dtype=self.dtype)

        if self.two_passes and conditioning.negative is not None and self.guidance_scale > 1:
            unguided = self.family.unguided_scale
            return in_two_passes(
                lambda rows: velocity(rows, unguided),
                conditioning,
                self.guidance_scale,
                negative_gradient=self.negative_gradient,
            )
        return velocity(conditioning, self.guidance_scale)
