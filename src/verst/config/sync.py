"""How weights get from the trainer to the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from verst.config.basis import PositiveFloat, PositiveInt, Section
from verst.errors import ConfigError


class _Sync(Section):
    lora: Literal["pairs", "merged_in_engine"] = "pairs"
    """pairs: engines compute with unmerged LoRA, like the trainer. merged_in_engine: they keep their base weights and add the pairs to them in fp32 at every sync; faster sampling, and a ratio before the update that is near 1 instead of exactly 1."""
    bucket_bytes: PositiveInt = 256 * 2**20
    """Largest flat bucket."""


class _CheckedSync(_Sync):
    digest: Literal["multilinear", "sha256"] = "multilinear"
    """Checksum of the certificate. multilinear runs on the device at memory speed and finds faults; sha256 is made on the CPU."""


class AutoSync(_CheckedSync):
    """Chosen when the run starts, from where its processes are."""

    type: Literal["auto"] = "auto"


class ShmSync(_CheckedSync):
    """Shared memory of one host."""

    type: Literal["shm"] = "shm"


class CudaIpcSync(_CheckedSync):
    """A staging buffer on the GPU that trainer rank 0 and the engines share."""

    type: Literal["cuda_ipc"] = "cuda_ipc"


class CollectiveSync(_Sync):
    """Broadcasts in a process group of trainer ranks and engines: NCCL, or gloo on CPUs."""

    type: Literal["collective"] = "collective"
    timeout_s: PositiveFloat = 120.0
    """Seconds that the others wait for one of them."""


class DiskSync(_CheckedSync):
    """Safetensors files in a folder."""

    type: Literal["disk"] = "disk"
    folder: Path
    """Shared by all hosts and used for nothing else; the run's versions in it are removed at its end."""


ChosenSync = ShmSync | CudaIpcSync | CollectiveSync | DiskSync
SyncConfig = Annotated[AutoSync | ChosenSync, Field(discriminator="type")]


def chosen(config: AutoSync, name: Literal["shm", "cuda_ipc", "collective"]) -> ChosenSync:
    """What an automatic choice becomes. Raises ConfigError where it cannot be what was asked for."""
    if name == "collective":
        if config.digest == "sha256":
            raise ConfigError(
                "sync.digest = sha256 is made on the CPU, and sync.type = auto chose collective here: use multilinear, or "
                "sync.type = shm or disk where that is possible"
            )
        return CollectiveSync(lora=config.lora, bucket_bytes=config.bucket_bytes)
    variant = {"shm": ShmSync, "cuda_ipc": CudaIpcSync}[name]
    return variant(lora=config.lora, bucket_bytes=config.bucket_bytes, digest=config.digest)
