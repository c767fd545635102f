"""Pixels and latents of diffusers' AutoencoderKL with a scale and a shift: SD3, FLUX.1, Z-Image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def encode_images(vae: Any, media: Tensor, device: torch.device) -> Tensor:
    """uint8 [B, 1, H, W, 3] -> normalised latents [B, C, h, w] fp32: the mode of the posterior."""
    pixels = media[:, 0].permute(0, 3, 1, 2).to(device, vae.dtype) / 127.5 - 1
    x0 = vae.encode(pixels).latent_dist.mode()
    return ((x0 - vae.config.shift_factor) * vae.config.scaling_factor).float()


@torch.no_grad()
def decode_images(vae: Any, latents: Tensor) -> Tensor:
    """Normalised latents [B, C, h, w] -> fp32 [B, 1, 3, H, W] in [0, 1]."""
    x0 = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
    return (vae.decode(x0, return_dict=False)[0] / 2 + 0.5).clamp(0, 1).float().unsqueeze(1)
