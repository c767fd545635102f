"""How conditional and unconditional velocities are combined."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def classifier_free(
    conditional: Float[Tensor, "*s"], unconditional: Float[Tensor, "*s"], scale: float
) -> Float[Tensor, "*s"]:
    """u + g (c - u), g = 1 is the conditional velocity (arXiv 2207.12598)."""
    return unconditional + scale * (conditional - unconditional)
