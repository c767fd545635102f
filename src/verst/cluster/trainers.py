"""The trainer's ranks as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from verst.algorithms.pairs import PairBlock
from verst.cluster.calls import result_of
from verst.cluster.tensors import to_same_host
from verst.config.sections import ChosenSync
from verst.errors import ProcessDied, StateLost
from verst.trainer.rl import UpdateMetrics
from verst.weights.block import host_identity

_UNTIL_AN_END_IS_KNOWN_S = 3.0


class TrainerGroup:
    """All trainer ranks as one. Where one is lost, or out of memory, all are: every call raises StateLost then."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.names = [f"trainer rank {i}" for i in range(len(ranks))]
        self.busy = asyncio.Lock()
        """Held while weights change or go out."""
        self._begin(ranks)

    def _begin(self, ranks: Sequence[Any]) -> None:
        self.ranks = list(ranks)
        self.state = 0
        """Another number for other weights; 0 = as they were built."""
        self.lost: dict[str, str] = {}
        """Rank -> how it was lost."""
        self.num_done = 0
        """Calls that have ended."""
        self._in_flight = 0
        self._hosts: list[str] = []

    def renew(self, ranks: Sequence[Any]) -> None:
        """Others in the place of lost ones; `build` comes next."""
        self._begin(ranks)

    @property
    def has_work(self) -> bool:
        return self._in_flight > 0

    async def check(self) -> None:
        """Raises StateLost where a rank is gone; one that is at work answers."""
        await self._all("progress")

    async def locate(self) -> None:
        """Ask the ranks where they are, so that those of this host map what they are sent."""
        self._hosts = await self._all("host")

    async def build(self, sync: ChosenSync) -> None:
        ((host, port),) = await self._results([self.ranks[0].open.remote()])
        await self._all("build", host, port, sync)

    async def lend(self) -> list[Any]:
        """Each rank's frozen weights, for the engine beside it."""
        return await self._all("lend")

    async def update(self, shares: Sequence[list[list[PairBlock]]]) -> UpdateMetrics:
        """One share a rank: for each optimizer step its pair blocks."""
        async with self.busy:
            self.state += 1
            refs = []
            for rank, host, share in zip(self.ranks, self._hosts, shares, strict=True):
                with to_same_host(host == host_identity()):
                    refs.append(rank.update.remote(share))
            metrics: list[UpdateMetrics] = await self._results(refs)
            return metrics[0]

    async def publish(self, version: int, *, ema: bool = False, receivers: int) -> list[Mapping[str, Any]]:
        """The manifest of the weights that engines may take until `unpublish`: one for all, or one for each engine
        of the rank beside it."""
        manifests = await self._all("publish", version, ema, receivers)
        return [manifest for manifest in manifests if manifest is not None]

    async def send(self) -> str:
        """Beside the engines' work; the digest of what was sent."""
        digest: str = (await self._all("send"))[0]
        return digest

    async def unpublish(self) -> None:
        await self._all("unpublish")

    async def save(self, root: Path, iteration: int) -> None:
        await self._all("save", root.absolute(), iteration)

    async def saved(self) -> bool:
        """Whether all ranks have written what they staged. Raises CheckpointError."""
        return all(await self._all("saved"))

    async def finish_save(self) -> None:
        await self._all("finish_save")

    async def load(self, folder: Path) -> None:
        async with self.busy:
            self.state += 1
            await self._all("load", folder.absolute())

    async def scale_lr(self, scale: float) -> None:
        """Learning rates from now on are the schedule's times `scale`."""
        await self._all("scale_lr", scale)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await self._results([getattr(rank, method).remote(*args) for rank in self.ranks])

    async def _results(self, refs: Sequence[Awaitable[Any]]) -> list[Any]:
        """Of the first ranks."""
        self._in_flight += 1
        lost = self.lost
        calls = [asyncio.ensure_future(_result(name, ref, lost)) for name, ref in zip(self.names, refs, strict=False)]
        try:
            return list(await asyncio.gather(*calls))
        except RuntimeError as error:
            # A rank that another one has left alone may say so before that one's end is known here.
            await asyncio.wait(calls, timeout=_UNTIL_AN_END_IS_KNOWN_S)
            if lost:
                raise StateLost("; ".join(lost.values())) from error
            raise
        finally:
            self._in_flight -= 1
            self.num_done += 1


async def _result(name: str, ref: Awaitable[Any], lost: dict[str, str]) -> Any:
    try:
        return await result_of(ref, role=name)
    except (ProcessDied, torch.OutOfMemoryError, MemoryError) as error:
        lost.setdefault(name, str(error) if isinstance(error, ProcessDied) else f"{type(error).__name__}: {error}")
        raise StateLost(str(error)) from error
