"""Normalisation of latents by the mean and deviation of each channel, as the Wan and Qwen autoencoders state them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def normalised(latents: Tensor, vae: Any) -> Tensor:
    """[B, C, T, H, W] of the autoencoder -> what the transformer was trained on."""
    mean, inverse_std = _stats(latents, vae)
    return (latents - mean) * inverse_std


def denormalised(latents: Tensor, vae: Any) -> Tensor:
    """The inverse, in the order of operations of diffusers' pipelines."""
    mean, inverse_std = _stats(latents, vae)
    return latents / inverse_std + mean


def _stats(latents: Tensor, vae: Any) -> tuple[Tensor, Tensor]:
    mean, std = (
        torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, 1.0 / std
