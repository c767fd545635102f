"""How conditional and unconditional velocities are combined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from verst.errors import InvariantError
from verst.types import Conditioning, Latents


def classifier_free(
    conditional: Float[Tensor, "*s"], unconditional: Float[Tensor, "*s"], scale: float
) -> Float[Tensor, "*s"]:
    """u + g (c - u), g = 1 is the conditional velocity (arXiv 2207.12598)."""
    return unconditional + scale * (conditional - unconditional)


def in_two_passes(
    velocity: Callable[[Conditioning], Latents],
    conditioning: Conditioning,
    scale: float,
    *,
    negative_gradient: bool = True,
) -> Latents:
    """Classifier-free guidance with one forward for each prompt: stream -> [B, ...], `scale` > 1.

    velocity: the model's unguided velocity under the `positive` rows of what it is given. negative_gradient: that of the
    negative prompt has one, where there are any. Raises InvariantError without negative rows.
    """
    if conditioning.negative is None:
        raise InvariantError(f"guidance_scale = {scale} needs the rows of a negative prompt")
    # First: nothing of it is kept when the other side's activations are.
    with torch.set_grad_enabled(negative_gradient and torch.is_grad_enabled()):
        negative = velocity(dataclasses.replace(conditioning, positive=conditioning.negative, negative=None))
    positive = velocity(dataclasses.replace(conditioning, negative=None))
    return {name: classifier_free(v, negative[name], scale) for name, v in positive.items()}
