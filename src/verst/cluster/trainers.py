"""The trainer's ranks as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verst.algorithms.pairs import PairBlock
from verst.cluster.calls import all_of, result_of
from verst.cluster.tensors import to_same_host
from verst.config.sections import ChosenSync
from verst.trainer.rl import UpdateMetrics
from verst.weights.block import host_identity


class TrainerGroup:
    """All trainer ranks as one."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = list(ranks)
        self._roles = [f"trainer rank {i}" for i in range(len(ranks))]
        self._hosts: list[str] = []

    async def locate(self) -> None:
        """Ask the ranks where they are, so that those of this host map what they are sent."""
        self._hosts = await self._all("host")

    async def build(self, sync: ChosenSync) -> None:
        host, port = await result_of(self.ranks[0].open.remote(), role=self._roles[0])
        await self._all("build", host, port, sync)

    async def lend(self) -> list[Any]:
        """Each rank's frozen weights, for the engine beside it."""
        return await self._all("lend")

    async def update(self, shares: Sequence[list[list[PairBlock]]]) -> UpdateMetrics:
        """One share a rank: for each optimizer step its pair blocks."""
        refs = []
        for rank, host, share in zip(self.ranks, self._hosts, shares, strict=True):
            with to_same_host(host == host_identity()):
                refs.append(rank.update.remote(share))
        metrics: list[UpdateMetrics] = await all_of(refs, roles=self._roles)
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
        await self._all("load", folder.absolute())

    async def scale_lr(self, scale: float) -> None:
        """Learning rates from now on are the schedule's times `scale`."""
        await self._all("scale_lr", scale)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await all_of([getattr(rank, method).remote(*args) for rank in self.ranks], roles=self._roles)
