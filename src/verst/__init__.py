"""verst: post-training of diffusion models."""

__version__ = "0.1.0"
