"""The autoencoder of a model built from nothing: learn to rebuild pictures, then measure the latents' scale."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verst.config.sections import AutoencoderConfig, TrainerConfig
from verst.data.text_lines import TextLines
from verst.families import Components
from verst.flow.noise import derive_seed
from verst.trainer.core import StepMetrics, TileLoss, Trainer

_NUM_SCALE_PICTURES = 1024
"""Pictures whose latents set the scale: their mean and deviation are then known to about a percent."""


def train_autoencoder(
    components: Components,
    data: TextLines,
    config: AutoencoderConfig,
    *,
    seed: int,
    report: Callable[[int, StepMetrics], None],
) -> None:
    """Train the AutoencoderKL of `components` in place and set its scaling_factor and shift_factor.

    `report` hears every step: (steps taken, metrics). Raises InvariantError when the loss is not finite.
    """
    vae = components.modules["vae"]
    vae.requires_grad_(True)
    optimizer = TrainerConfig(
        tile_size=config.batch_size, lr=config.lr, betas=(0.9, 0.99), schedule="cosine", warmup_steps=config.steps // 20
    )
    trainer = Trainer({"vae": vae}, optimizer, total_steps=config.steps)
    for step in range(config.steps):
        _, media = data.batch(config.batch_size, seed=derive_seed(seed, "autoencoder", step))
        pixels = to_pixels(media, components.device)
        report(step + 1, trainer.step([functools.partial(_tile, vae, pixels)]))
    vae.requires_grad_(False)
    _, media = data.batch(_NUM_SCALE_PICTURES, seed=derive_seed(seed, "latent scale"))
    set_latent_scale(vae, to_pixels(media, components.device))


def _tile(vae: Any, pixels: Tensor) -> TileLoss:
    return TileLoss(loss=reconstruction_loss(vae, pixels))


def to_pixels(media: Tensor, device: torch.device) -> Tensor:
    """uint8 [B, 1, H, W, 3] -> fp32 [B, 3, H, W] in [-1, 1]."""
    return media[:, 0].permute(0, 3, 1, 2).to(device).float() / 127.5 - 1


def reconstruction_loss(vae: Any, pixels: Tensor) -> Tensor:
    """Mean absolute plus mean squared error of decode(mode(encode(pixels))); pixels: fp32 [B, 3, H, W] in [-1, 1]."""
    rebuilt = vae.decode(vae.encode(pixels).latent_dist.mode(), return_dict=False)[0]
    error = rebuilt - pixels
    return error.abs().mean() + error.square().mean()


@torch.no_grad()
def set_latent_scale(vae: Any, pixels: Tensor) -> None:
    """(x0 - shift_factor) * scaling_factor then has mean 0 and deviation 1 over these pictures [B, 3, H, W]."""
    x0 = torch.cat([vae.encode(part).latent_dist.mode() for part in pixels.split(128)])
    vae.register_to_config(shift_factor=float(x0.mean()), scaling_factor=float(1 / x0.std()))
