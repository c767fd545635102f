"""Where the two ends of a hand-off are, and which transport joins them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from verst.errors import ConfigError
from verst.weights.block import host_identity

TransportName = Literal["shm", "cuda_ipc", "collective"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Of one process. Equal hosts can open each other's memory, equal devices are one."""

    host: str
    device: str
    """cpu, or a GPU's UUID."""

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"


def here(device: torch.device) -> Place:
    """The place of this process."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
    return Place(host=host_identity(), device=gpu)


def choose(
    trainers: Sequence[Place], engines: Sequence[Place], *, colocated: bool = False
) -> tuple[TransportName, str]:
    """(transport, why it) for trainer ranks, rank 0 first, and engines. Raises ConfigError where none fits.

    colocated: engine i is where rank i is, and takes its weights from there.
    """
    if colocated and all(place.is_gpu for place in trainers):
        return "cuda_ipc", "each engine is on the GPU of a trainer rank"
    if colocated:
        return "shm", "each engine is on the host of a trainer rank, no GPU"
    hosts = {place.host for place in (*trainers, *engines)}
    gpus = [place.device for place in (*trainers, *engines) if place.is_gpu]
    all_gpus = len(gpus) == len(trainers) + len(engines)
    if all_gpus and {place.device for place in engines} == {trainers[0].device}:
        return "cuda_ipc", "trainer rank 0 and every engine share a GPU"
    if all_gpus and len(set(gpus)) == len(gpus):
        return "collective", "trainer ranks and engines have a GPU each (NCCL)"
    if len(hosts) == 1:
        shared = "engines on the GPUs of other trainer ranks" if all_gpus else "engines take weights in host memory"
        return "shm", f"one host, {shared if gpus else 'no GPU'}"
    if not gpus:
        return "collective", f"{len(hosts)} hosts without GPUs (gloo)"
    raise ConfigError(
        f"sync.type = auto finds no way between {len(trainers)} trainer ranks and {len(engines)} engines on {len(hosts)} "
        "hosts, some of which share a GPU (NCCL refuses that): give each a GPU of its own, or use sync.type = disk with "
        "a sync.folder that all hosts share"
    )
