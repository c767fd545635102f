"""What takes the optimizer steps; learning rate, moment decays and weight decay are keys of [trainer] itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from verst.config.basis import Flag, Section, UnitFloat
from verst.errors import ConfigError


class AdamWOptimizer(Section):
    """torch's AdamW (Loshchilov and Hutter 2019)."""

    type: Literal["adamw"] = "adamw"
    implementation: Literal["auto", "fused", "foreach", "for_loop"] = "auto"
    """torch's kernels, equal up to rounding: fused is one launch for many parameters, foreach some, for_loop some for
    each parameter. auto = fused where the trainer has a GPU, else for_loop."""


class AdamW8bitOptimizer(Section):
    """AdamW with both moments in 8 bits and a scale for 256 values (Dettmers et al. 2022): 2 bytes a parameter instead
    of 8. Parameters below 4096 values, or with rows that are not whole blocks of 256, keep theirs as they are."""

    type: Literal["adamw_8bit"] = "adamw_8bit"


class SgdOptimizer(Section):
    """torch's SGD; weight decay is an L2 gradient there, and trainer.betas is not read."""

    type: Literal["sgd"] = "sgd"
    momentum: UnitFloat = 0.0
    """0 keeps no state."""
    nesterov: Flag = False
    """Needs momentum."""

    @model_validator(mode="after")
    def _momentum(self) -> SgdOptimizer:
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "trainer.optimizer.nesterov = true with momentum = 0 looks ahead along nothing; set momentum, e.g. 0.9"
            )
        return self


OptimizerConfig = Annotated[AdamWOptimizer | AdamW8bitOptimizer | SgdOptimizer, Field(discriminator="type")]
