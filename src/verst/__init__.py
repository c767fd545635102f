"""verst: post-training of diffusion models."""

from verst import torchvision_shim

__version__ = "0.1.0"

torchvision_shim.install()
