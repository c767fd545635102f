"""Broadcasts over a process group of all trainer ranks and engines: NCCL between GPUs, gloo between CPUs.

Each bucket is gathered from the ranks' shards, put into one flat buffer by its owner (buckets take turns over the
ranks) and broadcast from there, its tensors' digests behind its bytes. No rank ever holds more than a bucket of it.

    receiver   "ready" or its refusal ──> store ──> rank 0: go, or stop ──> store ──> everyone
    all        bucket 0 from rank 0, bucket 1 from rank 1, ...

So a receiver that does not take the weights is known before the first byte, and then nobody's weights change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from verst.errors import SyncError
from verst.weights.digest import Ledger
from verst.weights.fill import Filler
from verst.weights.manifest import Bucket, Manifest, TensorEntry, aligned, bucket_size, view_in
from verst.weights.send import Outgoing
from verst.weights.transports.base import Incoming

_GO = "go"


class _Group:
    """A process group beside torch's default one, which the trainer's own mesh lives in."""

    def __init__(self, store: Store, *, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self.device = device
        self._group: Any
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, self._timeout)

    def broadcast(self, buffer: Tensor, root: int) -> Any:
        """Started; `wait` on what comes back."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._group.broadcast([buffer], options)

    def wait(self, work: Any) -> None:
        work.wait() if self.device.type == "cuda" else work.wait(self._timeout)

    def close(self) -> None:
        if self.device.type == "cuda":
            self._group.abort()


class CollectiveSender:
    """`host` and `port` are where `store`, a TCPStore, can be reached from the engines. One sender a store and rank."""

    def __init__(
        self,
        store: Store,
        *,
        host: str,
        port: int,
        device: torch.device,
        rank: int,
        ranks: int,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._store, self._host, self._port = PrefixStore("verst-sync", store), host, port
        self._device, self._rank, self._ranks = device, rank, ranks
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._group: _Group | None = None
        self._receivers = 0
        self._generation = 0
        """A group is made anew after a failure, and when the number of receivers changes."""
        self._number = 0
        self._outgoing: Outgoing | None = None

    def publish(self, outgoing: Outgoing, *, receivers: int) -> Manifest | None:
        outgoing.check_shards()
        self._outgoing = outgoing
        self._number += 1
        if self._group is not None and receivers != self._receivers:
            self._leave()
        if self._group is None:
            self._generation += 1
        self._receivers = receivers
        if self._rank:
            return None
        endpoint = {
            "host": self._host,
            "port": self._port,
            "generation": self._generation,
            "is_new": self._group is None,
            "number": self._number,
            "ranks": self._ranks,
            "receivers": receivers,
            "timeout_s": self._timeout_s,
        }
        buckets = [
            Bucket(handle="", nbytes=bucket_size(entries), tensors=entries)
            for entries in outgoing.layout(self._bucket_bytes)
        ]
        return Manifest(
            version=outgoing.version,
            finetune=outgoing.finetune,
            transport="collective",
            endpoint=endpoint,
            buckets=buckets,
            digest="",
        )

    def send(self) -> str | None:
        assert self._outgoing is not None, "publish() comes first"
        try:
            self._agree()
            return self._broadcast(self._outgoing)
        except RuntimeError as error:
            self._leave()
            raise SyncError(f"the weights were not sent to all {self._receivers} engines: {error}") from error
        except SyncError:
            self._leave()
            raise

    def _agree(self) -> None:
        """Returns when every receiver is ready. Raises SyncError on all ranks when one is not."""
        store, key = PrefixStore(str(self._number), self._store), "decision"
        timeout = timedelta(seconds=self._timeout_s)
        if self._rank == 0:
            store.set(key, self._decision(store, timeout))
        store.wait([key], timeout * 2)
        decision = store.get(key).decode()
        if decision != _GO:
            raise SyncError(f"weights of version {self._outgoing.version} were not sent: {decision}")  # type: ignore[union-attr]
        if self._group is None:
            self._group = _Group(
                PrefixStore(f"group{self._generation}", self._store),
                rank=self._rank,
                size=self._ranks + self._receivers,
                device=self._device,
                timeout_s=self._timeout_s,
            )

    def _decision(self, store: Store, timeout: timedelta) -> str:
        votes = [f"vote{index}" for index in range(self._receivers)]
        for index, vote in enumerate(votes):
            try:
                store.wait([vote], timeout)
            except RuntimeError:
                return f"{index} of {self._receivers} engines were ready after {self._timeout_s:g} s (sync.timeout_s)"
            said = store.get(vote).decode()
            if said != _GO:
                return said
        return _GO

    def _broadcast(self, outgoing: Outgoing) -> str | None:
        group, layout = self._group, outgoing.layout(self._bucket_bytes)
        assert group is not None
        size = max(_buffer_size(entries) for entries in layout)
        # Two, so that a bucket is filled while the one before is on its way.
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        works: list[Any] = [None, None]
        numbers: list[Tensor] = []
        for index, entries in enumerate(layout):
            slot, owner = index % 2, index % self._ranks
            if works[slot] is not None:
                group.wait(works[slot])
                numbers.append(_tail(buffers[slot], layout[index - 2]))
            buffer = buffers[slot][: _buffer_size(entries)]
            sources = outgoing.sources(entries)
            if owner == self._rank:
                filled = Filler([view_in(buffer, entry) for entry in entries]).fill(sources)
                _digest_place(buffer, entries).copy_(filled.digests)
            works[slot] = group.broadcast(buffer, owner)
        for index in range(max(0, len(layout) - 2), len(layout)):
            group.wait(works[index % 2])
            numbers.append(_tail(buffers[index % 2], layout[index]))
        return _digest_of(layout, numbers) if self._rank == 0 else None

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def release(self) -> None:
        self._outgoing = None

    def close(self) -> None:
        self.release()
        self._leave()


class CollectiveReceiver:
    """Joins the trainer's group at the first publication and stays in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stores: dict[tuple[str, int], Store] = {}
        self._group: tuple[int, _Group] | None = None

    @contextmanager
    def open(self, manifest: Manifest) -> Iterator[Incoming]:
        endpoint = manifest["endpoint"]
        generation = endpoint["generation"]
        if not endpoint["is_new"] and (self._group is None or self._group[0] != generation):
            reason = "an engine joined after the group was made; publish again"
            self.refuse(manifest, reason)
            raise SyncError(f"{reason}. Nothing was changed.")
        try:
            self._vote(manifest, _GO)
            group = self._join(manifest)
        except RuntimeError as error:
            raise SyncError(f"the trainer did not answer: {error}. Nothing was changed.") from error
        done = False
        try:
            yield _Broadcasts(manifest, group)
            done = True
        except RuntimeError as error:
            raise SyncError(f"the trainer broke off in the middle: {error}") from error
        finally:
            if not done:
                self._leave()

    def refuse(self, manifest: Manifest, reason: str) -> None:
        try:
            self._vote(manifest, reason, wait=False)
        except RuntimeError as error:
            raise SyncError(f"{reason} (and the trainer cannot be told: {error})") from error

    def _vote(self, manifest: Manifest, vote: str, *, wait: bool = True) -> None:
        endpoint = manifest["endpoint"]
        store = PrefixStore(str(endpoint["number"]), self._store(endpoint))
        store.set(f"vote{store.add('votes', 1) - 1}", vote)
        if not wait:
            return
        store.wait(["decision"], timedelta(seconds=2 * endpoint["timeout_s"]))
        decision = store.get("decision").decode()
        if decision != _GO:
            raise SyncError(f"the trainer sent nothing: {decision}. Nothing was changed.")

    def _join(self, manifest: Manifest) -> _Group:
        endpoint = manifest["endpoint"]
        generation = endpoint["generation"]
        if self._group is None or self._group[0] != generation:
            self._leave()
            store = PrefixStore(f"group{generation}", self._store(endpoint))
            group = _Group(
                store,
                rank=endpoint["ranks"] + store.add("members", 1) - 1,
                size=endpoint["ranks"] + endpoint["receivers"],
                device=self._device,
                timeout_s=endpoint["timeout_s"],
            )
            self._group = (generation, group)
        return self._group[1]

    def _store(self, endpoint: Mapping[str, Any]) -> Store:
        where = (endpoint["host"], endpoint["port"])
        if where not in self._stores:
            timeout = timedelta(seconds=endpoint["timeout_s"])
            self._stores[where] = TCPStore(*where, is_master=False, timeout=timeout, wait_for_workers=False)
        return PrefixStore("verst-sync", self._stores[where])

    def _leave(self) -> None:
        if self._group is not None:
            self._group[1].close()
            self._group = None

    def close(self) -> None:
        self._leave()
        self._stores = {}


class _Broadcasts:
    def __init__(self, manifest: Manifest, group: _Group) -> None:
        self._manifest, self._group = manifest, group
        self._layout = [bucket["tensors"] for bucket in manifest["buckets"]]
        self._sent: list[Tensor] = []

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        layout = self._layout
        size = max(_buffer_size(entries) for entries in layout)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._group.device) for _ in range(2)]

        def begin(index: int) -> Any:
            buffer = buffers[index % 2][: _buffer_size(layout[index])]
            return self._group.broadcast(buffer, index % self._manifest["endpoint"]["ranks"])

        coming = begin(0)
        for index, entries in enumerate(layout):
            self._group.wait(coming)
            if index + 1 < len(layout):
                coming = begin(index + 1)
            buffer = buffers[index % 2]
            self._sent.append(_tail(buffer, entries))
            yield {entry["name"]: view_in(buffer, entry) for entry in entries}

    def digest(self) -> str:
        return _digest_of(self._layout, self._sent)


def _buffer_size(entries: list[TensorEntry]) -> int:
    return aligned(bucket_size(entries)) + 8 * len(entries)


def _digest_place(buffer: Tensor, entries: list[TensorEntry]) -> Tensor:
    """[n] int64 behind the bucket's bytes."""
    start = aligned(bucket_size(entries))
    return buffer[start : start + 8 * len(entries)].view(torch.int64)


def _tail(buffer: Tensor, entries: list[TensorEntry]) -> Tensor:
    return _digest_place(buffer, entries).clone()


def _digest_of(layout: list[list[TensorEntry]], numbers: list[Tensor]) -> str:
    entries = tuple((e["name"], e["dtype"], tuple(e["shape"])) for bucket in layout for e in bucket)
    return _ledger(entries).digest(torch.cat(numbers))


@functools.lru_cache(maxsize=8)
def _ledger(entries: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Ledger:
    """A run sends the same tensors every time."""
    return Ledger(entries)
