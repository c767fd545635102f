"""The trainer's dtypes beside `model.dtype`, which is that of the forward in engine and trainer alike."""

from __future__ import annotations

from typing import Literal

from verst.config.basis import DType, Section
from verst.errors import ConfigError


class PrecisionConfig(Section):
    master: Literal["float32", "forward"] = "float32"
    """What trained parameters, and so the optimizer's moments, are kept in: float32, or forward = model.dtype, which
    takes half the memory and loses every update below a parameter's last bit. docs/precision.md."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """What gradients are added up in, over tiles and ranks; bfloat16 halves the traffic."""


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
    if precision.reduce == "bfloat16" and not reduces:
        raise ConfigError(
            'trainer.precision.reduce = "bfloat16": SFT runs in one process and reduces nothing; remove it'
        )
    if precision.reduce == "bfloat16" and forward != "bfloat16":
        raise ConfigError(
            f'trainer.precision.reduce = "bfloat16" with model.dtype = "{forward}" would round gradients that were '
            f'computed with more digits; use reduce = "float32"{"" if forward == "float16" else ", or a smaller dtype"}'
        )
