"""The trainer's dtypes beside `model.dtype`, which is that of the forward in engine and trainer alike."""

from __future__ import annotations

import math
from typing import Literal

from verst.config.basis import DType, PositiveFloat, PositiveInt, Section
from verst.errors import ConfigError


class PrecisionConfig(Section):
    master: Literal["float32", "forward"] = "float32"
    """What trained parameters, and so the optimizer's moments, are kept in: float32, or forward = model.dtype, which
    takes half the memory and loses every update below a parameter's last bit. docs/precision.md."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """What gradients are added up in, over tiles and ranks; bfloat16 halves the traffic."""

    loss_scale: PositiveFloat | None = None
    """Of a float16 forward: the first factor of the loss, a power of two; unset = 65536. It halves where gradients
    overflow, and that step is skipped."""
    loss_scale_interval: PositiveInt | None = None
    """Of a float16 forward: optimizer steps in a row without overflow that double the factor; unset = 2000."""

    @property
    def first_loss_scale(self) -> float:
        return self.loss_scale or 2.0**16

    @property
    def doubling_steps(self) -> int:
        return self.loss_scale_interval or 2000


def check_precision(precision: PrecisionConfig, *, forward: DType, reduces: bool) -> None:
    """Raises ConfigError for dtypes that do not go together. reduces: there may be several ranks."""
    if precision.master == "forward" and forward != "bfloat16":
        why = (
            "that is float32 either way"
            if forward == "float32"
            else "Adam's second moments and small updates underflow in float16"
        )
        raise ConfigError(
            f'trainer.precision.master = "forward" with model.dtype = "{forward}": {why}; use master = "float32", or '
            'model.dtype = "bfloat16"'
        )
    for name in ("loss_scale", "loss_scale_interval"):
        value = getattr(precision, name)
        if value is not None and forward != "float16":
            raise ConfigError(
                f'trainer.precision.{name} = {value:g} with model.dtype = "{forward}": only float16 needs its loss '
                "scaled; remove it"
            )
    scale = precision.first_loss_scale
    if scale < 1 or math.frexp(scale)[0] != 0.5:
        raise ConfigError(
            f"trainer.precision.loss_scale = {scale:g} must be a power of two and at least 1, so that scaling rounds "
            f"nothing; nearest: {2.0 ** max(0, round(math.log2(scale))):g}"
        )
    if precision.reduce == "bfloat16" and not reduces:
        raise ConfigError(
            'trainer.precision.reduce = "bfloat16": SFT runs in one process and reduces nothing; remove it'
        )
    if precision.reduce == "bfloat16" and forward != "bfloat16":
        raise ConfigError(
            f'trainer.precision.reduce = "bfloat16" with model.dtype = "{forward}" would round gradients that were '
            f'computed with more digits; use reduce = "float32"{"" if forward == "float16" else ", or a smaller dtype"}'
        )
