"""One staging buffer on the GPU that trainer and engines share: opened once by its handle, filled at every publication.

The handle travels in the manifest. Buckets are ranges of the buffer, so neither side makes an allocation, and the
whole hand-off is two passes over the device's memory, one by the trainer and one by the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verst.errors import SyncError
from verst.weights import gpu_memory
from verst.weights.digest import Digester, DigestKind, Ledger
from verst.weights.fill import Filler
from verst.weights.manifest import Bucket, Manifest, TensorEntry, aligned, bucket_size, view_in
from verst.weights.send import Outgoing
from verst.weights.transports.base import Incoming


class CudaIpcSender:
    """Rank 0 owns the buffer; the other ranks, on GPUs of their own, only help to gather."""

    def __init__(
        self, device: torch.device, *, rank: int, bucket_bytes: int, digest: DigestKind = "multilinear"
    ) -> None:
        self._device, self._rank, self._bucket_bytes, self._digest = device, rank, bucket_bytes, digest
        self._staging: Tensor | None = None
        self._endpoint: dict[str, Any] = {}
        self._buckets: list[Bucket] = []
        self._layout: list[list[TensorEntry]] = []
        self._fillers: list[Filler] = []
        self._names: list[str] = []
        self._ledger: Ledger | None = None
        self._digester: Digester | None = None
        """Of the buffer; None where its digest comes from filling it."""

    def publish(self, outgoing: Outgoing, *, receivers: int = 1) -> Manifest | None:
        del receivers
        layout = outgoing.layout(self._bucket_bytes)
        if self._rank == 0 and self._layout is not layout:
            self._stage(layout)
        filled = []
        for index, entries in enumerate(layout):
            sources = outgoing.sources(entries)
            if self._rank == 0:
                filled.append(self._fillers[index].fill(sources, check=True))
        if self._rank:
            return None
        # One wait; after it the engine may read, on a stream of its own.
        values = torch.stack([torch.cat([f.digests for f in filled]), torch.cat([f.broken for f in filled])]).cpu()
        outgoing.refuse([self._names[index] for index in values[1].nonzero().flatten().tolist()])
        assert self._ledger is not None
        digest = self._ledger.digest(values[0]) if self._digester is None else self._digester.digest()
        return Manifest(
            version=outgoing.version,
            finetune=outgoing.finetune,
            transport="cuda_ipc",
            endpoint=self._endpoint,
            buckets=self._buckets,
            digest=digest,
        )

    def _block(self, bucket: Bucket) -> Tensor:
        assert self._staging is not None
        start = int(bucket["handle"])
        return self._staging[start : start + bucket["nbytes"]]

    def _stage(self, layout: list[list[TensorEntry]]) -> None:
        sizes = [aligned(bucket_size(entries)) for entries in layout]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        if self._staging is None or len(self._staging) < sum(sizes):
            self._staging = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            self._endpoint = gpu_memory.share(self._staging)
        self._buckets = [
            Bucket(handle=str(start), nbytes=size, tensors=entries)
            for start, size, entries in zip(starts, sizes, layout, strict=True)
        ]
        self._layout = layout
        entries = [entry for bucket in layout for entry in bucket]
        views = [[view_in(self._block(bucket), e) for e in bucket["tensors"]] for bucket in self._buckets]
        self._fillers = [Filler(places) for places in views]
        self._names = [entry["name"] for entry in entries]
        self._ledger = Ledger((e["name"], e["dtype"], e["shape"]) for e in entries)
        places = [place for of_bucket in views for place in of_bucket]
        named = dict(zip(self._names, places, strict=True))
        self._digester = Digester(named, self._digest) if self._digest == "sha256" else None

    def send(self) -> str | None:
        return None

    def release(self) -> None:
        """The buffer stays for the next publication."""

    def close(self) -> None:
        self._layout, self._buckets, self._fillers, self._names = [], [], [], []
        self._staging = self._ledger = self._digester = None


class _Staged:
    def __init__(self, manifest: Manifest, views: list[dict[str, Tensor]]) -> None:
        self._manifest, self._views = manifest, views

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        yield from self._views

    def digest(self) -> str:
        return self._manifest["digest"]


class CudaIpcReceiver:
    """Keeps the sender's buffer mapped, and its own views of it, until another one is announced."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._endpoint: dict[str, Any] = {}
        self._staging: Tensor | None = None
        self._buckets: list[Bucket] = []
        self._views: list[dict[str, Tensor]] = []

    @contextmanager
    def open(self, manifest: Manifest) -> Iterator[Incoming]:
        if manifest["endpoint"] != self._endpoint:
            self._map(manifest["endpoint"])
        if manifest["buckets"] != self._buckets:
            assert self._staging is not None
            self._buckets = manifest["buckets"]
            self._views = [
                {e["name"]: view_in(self._staging[int(b["handle"]) :][: b["nbytes"]], e) for e in b["tensors"]}
                for b in self._buckets
            ]
        yield _Staged(manifest, self._views)
        # The sender may fill the buffer again as soon as we have answered.
        torch.cuda.current_stream(self._device).synchronize()

    def _map(self, endpoint: dict[str, Any]) -> None:
        self.close()
        if self._device.type != "cuda":
            raise SyncError(
                f"sync.type = cuda_ipc, but this engine computes on {self._device}: use shm. Nothing was changed."
            )
        self._staging = gpu_memory.open_shared(endpoint, self._device)
        self._endpoint = endpoint

    def refuse(self, manifest: Manifest, reason: str) -> None:
        pass

    def close(self) -> None:
        self._views, self._buckets, self._staging, self._endpoint = [], [], None, {}
