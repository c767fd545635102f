"""The trainer's weights into engines: into all of them together, or again into one that came back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from verst.cluster.trainers import TrainerGroup
from verst.engine.client import EngineClient
from verst.errors import InvariantError, SyncError
from verst.rollout.engines import EnginePool, hand_over

_Take = Callable[[Sequence[Mapping[str, Any]], Awaitable[str] | None], Awaitable[str]]
"""(manifests, what the trainer sends beside) -> digest"""


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What engines were given last."""

    version: int
    ema: bool
    digest: str
    state: int
    """`TrainerGroup.state` that it was."""


class HandOver:
    """A hand-over has the trainer to itself: no update begins before it has ended."""

    def __init__(
        self,
        trainer: TrainerGroup,
        *,
        num_engines: int,
        per_engine: int,
        phase: Callable[[str, int], AbstractContextManager[None]] = lambda name, version: nullcontext(),
    ) -> None:
        """per_engine: ranks of each. phase: of a weight version, entered as it begins."""
        self._phase = phase
        self._trainer = trainer
        self._num_engines, self._per_engine = num_engines, per_engine
        self._held: _Held | None = None

    async def to_all(self, engines: EnginePool, version: int, *, ema: bool) -> Mapping[str, Any]:
        """The manifest. Raises SyncError, EngineError; engines may hold weights of two versions then, or none whole."""
        trainer = self._trainer
        async with trainer.busy:
            manifest, digest = await self._give(
                version, ema, self._num_engines, lambda manifests, sent: engines.sync(*manifests, digest=sent)
            )
            self._held = _Held(version=version, ema=ema, digest=digest, state=trainer.state)
            return manifest

    async def to_one(self, index: int, client: EngineClient) -> bool:
        """What the others hold, by the same transport and with a certificate of the same digest; False where the trainer
        has other weights by now.

        Raises SyncError, EngineError, and InvariantError where the trainer sends others.
        """
        trainer = self._trainer
        async with trainer.busy:
            held = self._held
            if held is None:
                return trainer.state == 0
            if held.state != trainer.state:
                return False
            _, digest = await self._give(
                held.version,
                held.ema,
                1,
                lambda manifests, sent: hand_over(
                    [client], [manifests[index if len(manifests) > 1 else 0]], digest=sent
                ),
            )
            if digest != held.digest:
                raise InvariantError(
                    f"weights of version {held.version} were {held.digest} when all engines took them, and are {digest} now"
                )
            return True

    async def _give(self, version: int, ema: bool, engines: int, take: _Take) -> tuple[Mapping[str, Any], str]:
        """The manifest, and the digest that `take` has found everywhere."""
        trainer = self._trainer
        with self._phase("publish", version):
            manifests = await trainer.publish(version, ema=ema, receivers=engines * self._per_engine)
        if len({manifest["digest"] for manifest in manifests}) > 1:
            raise SyncError(f"trainer ranks hold different weights of version {version}")
        if manifests[0]["digest"]:
            try:
                with self._phase("update", version):
                    return manifests[0], await take(manifests, None)
            finally:
                await trainer.unpublish()
        # Here the ranks work beside the engines: after a failure they may wait for the missing one yet, and nobody
        # should wait for them to say what it was.
        with self._phase("update", version):
            digest = await take(manifests, trainer.send())
        await trainer.unpublish()
        return manifests[0], digest

    def forget(self) -> None:
        """The trainer starts anew."""
        self._held = None
