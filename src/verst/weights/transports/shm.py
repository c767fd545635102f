"""Shared memory of one host: a block for each bucket, gone with its sender, whatever ends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor

from verst.weights.block import SharedBlock, open_block
from verst.weights.digest import DigestKind, digest_of
from verst.weights.manifest import Bucket, Manifest, bucket_size, view_in
from verst.weights.send import Outgoing
from verst.weights.transports.base import Incoming


class ShmSender:
    """Ranks other than 0 only help to gather."""

    def __init__(self, *, rank: int, bucket_bytes: int, digest: DigestKind = "multilinear") -> None:
        self._rank, self._bucket_bytes, self._digest = rank, bucket_bytes, digest
        self._blocks: list[SharedBlock] = []

    def publish(self, outgoing: Outgoing, *, receivers: int = 1) -> Manifest | None:
        del receivers
        self.release()
        views: dict[str, Tensor] = {}
        buckets = []
        for entries in outgoing.layout(self._bucket_bytes):
            if self._rank:
                outgoing.fill(None, entries)
                continue
            block = SharedBlock(bucket_size(entries))
            self._blocks.append(block)
            places = outgoing.fill(block.bytes, entries)
            outgoing.check_finite(places, entries)
            views |= {entry["name"]: place for entry, place in zip(entries, places, strict=True)}
            buckets.append(Bucket(handle=block.handle, nbytes=block.nbytes, tensors=entries))
        if self._rank:
            return None
        digest = digest_of(views, self._digest)
        return Manifest(
            version=outgoing.version,
            finetune=outgoing.finetune,
            transport="shm",
            endpoint={},
            buckets=buckets,
            digest=digest,
        )

    def send(self) -> str | None:
        return None

    def release(self) -> None:
        for block in self._blocks:
            block.close()
        self._blocks = []

    def close(self) -> None:
        self.release()


class MappedBuckets:
    """Buckets that all lie ready in memory, and a digest that the manifest says."""

    def __init__(self, manifest: Manifest, blocks: list[Tensor]) -> None:
        self._manifest, self._blocks = manifest, blocks

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        for block, bucket in zip(self._blocks, self._manifest["buckets"], strict=True):
            yield {entry["name"]: view_in(block, entry) for entry in bucket["tensors"]}

    def digest(self) -> str:
        return self._manifest["digest"]

    def drop(self) -> None:
        """Forget the blocks: they cannot be unmapped while tensors show them."""
        self._blocks.clear()


class ShmReceiver:
    @contextmanager
    def open(self, manifest: Manifest) -> Iterator[Incoming]:
        with ExitStack() as stack:
            incoming = MappedBuckets(
                manifest, [stack.enter_context(open_block(b["handle"], b["nbytes"])) for b in manifest["buckets"]]
            )
            stack.callback(incoming.drop)
            yield incoming

    def refuse(self, manifest: Manifest, reason: str) -> None:
        pass

    def close(self) -> None:
        pass
