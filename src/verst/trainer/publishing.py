"""The trainer's half of the weight sync, from the recipe's section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from verst.config import sections as s
from verst.weights.send import LoraForm
from verst.weights.transports import CollectiveSender, CudaIpcSender, DiskSender, Sender, ShmSender

FORMS: dict[str, LoraForm] = {"pairs": "pairs", "merged_in_engine": "merged"}
"""sync.lora -> how the manifest says it."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What a sender has to know of its trainer rank."""

    rank: int
    ranks: int
    store: Store
    """Where the ranks met; engines of the collective transport join them there."""
    device: torch.device
    feeds_engine: bool
    """An engine of its own stands beside each rank and takes what that rank holds."""

    @property
    def gathers_for(self) -> int:
        """0 where this rank fills memory that an engine reads; else it only helps to gather."""
        return 0 if self.feeds_engine else self.rank


def _shm(config: s.ShmSync | s.AutoSync, rank: Rank) -> Sender:
    return ShmSender(rank=rank.gathers_for, bucket_bytes=config.bucket_bytes, digest=config.digest)


def _cuda_ipc(config: s.CudaIpcSync, rank: Rank) -> Sender:
    return CudaIpcSender(rank.device, rank=rank.gathers_for, bucket_bytes=config.bucket_bytes, digest=config.digest)


def _collective(config: s.CollectiveSync, rank: Rank) -> Sender:
    store: Any = rank.store
    return CollectiveSender(
        store,
        host=store.host,
        port=store.port,
        device=rank.device,
        rank=rank.rank,
        ranks=rank.ranks,
        bucket_bytes=config.bucket_bytes,
        timeout_s=config.timeout_s,
    )


def _disk(config: s.DiskSync, rank: Rank) -> Sender:
    return DiskSender(config.folder, rank=rank.rank, bucket_bytes=config.bucket_bytes, digest=config.digest)


SENDERS: dict[type, Callable[[Any, Rank], Sender]] = {
    # The cluster replaces it by what it chose; a trainer without a cluster has its engine on its own host.
    s.AutoSync: _shm,
    s.ShmSync: _shm,
    s.CudaIpcSync: _cuda_ipc,
    s.CollectiveSync: _collective,
    s.DiskSync: _disk,
}
