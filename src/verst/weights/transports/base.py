"""The two halves of every transport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from verst.weights.manifest import Manifest
from verst.weights.send import Outgoing


class Sender(Protocol):
    """One trainer rank's half. Every rank makes the same calls in the same order; rank 0's answers are used."""

    def publish(self, outgoing: Outgoing, *, receivers: int) -> Manifest | None:
        """Make the weights ready to be taken; the manifest on rank 0. Raises SyncError for values that are not finite."""

    def send(self) -> str | None:
        """Called beside the receivers' work where the manifest has no digest: the digest of what was sent, on rank 0.

        Raises SyncError when not every receiver was ready.
        """

    def release(self) -> None:
        """The receivers are done."""

    def close(self) -> None:
        """Give everything back; the sender is not used again."""


class Incoming(Protocol):
    """One publication on the receiver's side, inside `Receiver.open`."""

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """name -> tensor, valid until the next bucket. Raises SyncError when the sender breaks off."""

    def digest(self) -> str:
        """Of all tensors as sent; known after the last bucket."""


class Receiver(Protocol):
    """An engine's half, kept from one publication to the next."""

    def open(self, manifest: Manifest) -> AbstractContextManager[Incoming]:
        """Everything that can fail before the first byte fails here, with a SyncError."""

    def refuse(self, manifest: Manifest, reason: str) -> None:
        """Tell a sender that waits for this receiver that it will not come."""

    def close(self) -> None: ...
