"""How weights travel: one file for each transport, a sender and a receiver in it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from verst.weights.transports.base import Incoming as Incoming
from verst.weights.transports.base import Receiver as Receiver
from verst.weights.transports.base import Sender as Sender
from verst.weights.transports.collective import CollectiveReceiver
from verst.weights.transports.collective import CollectiveSender as CollectiveSender
from verst.weights.transports.cuda_ipc import CudaIpcReceiver
from verst.weights.transports.cuda_ipc import CudaIpcSender as CudaIpcSender
from verst.weights.transports.disk import DiskReceiver
from verst.weights.transports.disk import DiskSender as DiskSender
from verst.weights.transports.shm import ShmReceiver
from verst.weights.transports.shm import ShmSender as ShmSender

RECEIVERS: dict[str, Callable[[torch.device], Receiver]] = {
    "shm": lambda device: ShmReceiver(),
    "cuda_ipc": CudaIpcReceiver,
    "collective": CollectiveReceiver,
    "disk": DiskReceiver,
}
"""`transport` of a manifest -> an engine's half, for the device that it computes on."""
