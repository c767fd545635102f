"""The process group of an engine of several ranks: rank 0 serves and decides, the others make its forwards with it.

    rank 0                       all ranks
    header (gloo) ------------>  what is called, plain values, names and shapes of tensors
    tensors (device) --------->  conditioning once a batch; latents and sigmas once a forward
    the same call  <---------->  the forward's own exchanges (families/sequence.py)
    verdicts (gloo) <----------  where weights came: each rank's certificate, or its reason

Latents, noise and log-probs are rank 0's alone, and whole: what it makes is what an engine of one rank makes wherever
their forwards agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from verst.errors import SyncError
from verst.families import Components
from verst.families.loading import read_config
from verst.families.sequence import SplitsSequence, check_degrees, sequence_groups, sequence_mesh, split_sequence
from verst.weights.lora import adaptable
from verst.weights.manifest import Certificate, Manifest
from verst.weights.receive import WeightReceiver


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How the ranks of one engine share the work, and where they find each other."""

    store: Store
    rank: int
    ulysses: int
    ring: int

    @property
    def size(self) -> int:
        return self.ulysses * self.ring


class Call(NamedTuple):
    """What rank 0 asks of the others."""

    name: str
    values: dict[str, Any]
    """What msgpack carries."""
    tensors: dict[str, Tensor]
    """On this rank's device."""


class EngineRanks:
    """One engine's ranks, as one of them sees them."""

    def __init__(self, meeting: Meeting, *, device: torch.device) -> None:
        """A collective: returns when all ranks have come."""
        self._meeting, self._device = meeting, device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=meeting.store,
            rank=meeting.rank,
            world_size=meeting.size,
        )
        # Between two requests the others wait here, for as long as it takes.
        self._control = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self._groups = sequence_groups(sequence_mesh(device.type, ulysses=meeting.ulysses, ring=meeting.ring))

    @property
    def size(self) -> int:
        return self._meeting.size

    def split(self, components: Components) -> None:
        """Cut the tokens of the transformer over the ranks. Raises ConfigError where they cannot be."""
        family = components.family
        check_degrees(
            family.name,
            family,
            read_config(components.folder, "transformer"),
            ulysses=self._meeting.ulysses,
            ring=self._meeting.ring,
            table="engine.parallel",
        )
        assert isinstance(family, SplitsSequence)
        for model in adaptable(components.transformer):
            split_sequence(model, family.sequence_plan, self._groups)

    def call(self, name: str, tensors: Mapping[str, Tensor] | None = None, **values: Any) -> None:
        """Rank 0: `next_call` of all others returns this."""
        sent = {key: value.to(self._device).contiguous() for key, value in (tensors or {}).items()}
        shapes = {key: (str(value.dtype).removeprefix("torch."), list(value.shape)) for key, value in sent.items()}
        self._say((name, values, shapes))
        for value in sent.values():
            dist.broadcast(value, src=0)

    def next_call(self) -> Call:
        """Another rank: wait for rank 0. Raises RuntimeError when it is gone."""
        name, values, shapes = self._hear()
        tensors = {
            key: torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for key, (dtype, shape) in shapes.items()
        }
        for value in tensors.values():
            dist.broadcast(value, src=0)
        return Call(name, values, tensors)

    def receive(self, receiver: WeightReceiver, manifest: Manifest) -> Certificate:
        """Every rank takes the weights; the certificate that all of them give. A collective.

        Raises SyncError on all ranks. Where some took them and others did not, the weights are of no version on any.
        """
        own: Certificate | str
        try:
            own = receiver.apply(manifest)
        except SyncError as error:
            own = str(error)
        said = self._all_say(own)
        if not isinstance(own, str) and all(verdict == own for verdict in said):
            return own
        refusals = {rank: verdict for rank, verdict in enumerate(said) if isinstance(verdict, str)}
        if len(refusals) == self.size:
            raise SyncError(f"rank 0 of the engine: {refusals[0]}")
        rank = min(refusals) if refusals else next(r for r, verdict in enumerate(said) if verdict != said[0])
        reason = f"rank {rank} of the engine does not hold what the others hold: {said[rank]}"
        receiver.invalid = receiver.invalid or reason
        raise SyncError(reason)

    def leave(self) -> None:
        dist.destroy_process_group()

    def _say(self, message: Any) -> None:
        """Rank 0, to all others. msgpack and not torch's own way of sending objects, which is pickle."""
        data = _packed(message)
        dist.broadcast(torch.tensor([len(data)]), src=0, group=self._control)
        dist.broadcast(data, src=0, group=self._control)

    def _hear(self) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._control)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._control)
        return _unpacked(data)

    def _all_say(self, message: Any) -> list[Any]:
        """What each rank says, by rank."""
        data = _packed(message)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._control)
        most = max(int(size) for size in sizes)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: len(data)] = data
        said = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(said, padded, group=self._control)
        return [_unpacked(data[: int(size)]) for data, size in zip(said, sizes, strict=True)]


def _packed(message: Any) -> Tensor:
    """[n] uint8."""
    return torch.frombuffer(bytearray(msgpack.packb(message)), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return msgpack.unpackb(data.numpy().tobytes())


def pack_rows(prefix: str, rows: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Tensors of one kind under names of their own in a call."""
    return {f"{prefix}/{name}": value for name, value in (rows or {}).items()}


def unpack_rows(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `pack_rows`."""
    start = f"{prefix}/"
    return {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
