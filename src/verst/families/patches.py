"""Latents as sequences of 2x2 patches, channels outermost: what the transformers of FLUX and Qwen-Image read."""

from __future__ import annotations

from torch import Tensor

from verst.types import Geometry


def pack_frames(frames: Tensor) -> Tensor:
    """[B, T, C, H, W] -> [B, T (H/2) (W/2), 4 C]."""
    b, t, c, h, w = frames.shape
    patches = frames.reshape(b, t, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4, 6)
    return patches.reshape(b, t * (h // 2) * (w // 2), 4 * c)


def unpack_frames(tokens: Tensor, num_frames: int, height: int, width: int) -> Tensor:
    """The inverse of `pack_frames`; height and width are the latent's."""
    b, _, c = tokens.shape
    patches = tokens.reshape(b, num_frames, height // 2, width // 2, c // 4, 2, 2).permute(0, 1, 4, 2, 5, 3, 6)
    return patches.reshape(b, num_frames, c // 4, height, width)


def token_grid(num_tokens: int, geometry: Geometry) -> tuple[int, int]:
    """(height, width) in tokens of a picture of `num_tokens` square tokens."""
    side = round((geometry.height * geometry.width / num_tokens) ** 0.5)
    return geometry.height // side, geometry.width // side
