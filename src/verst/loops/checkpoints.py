"""The driver's half of checkpoints: published at once, or in the background while the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verst.config.sections import RlCheckpointConfig
from verst.trainer import checkpoint


class SavingTrainer(Protocol):
    """Of the trainer's ranks, as one."""

    def save(self, root: Path, iteration: int) -> Awaitable[None]:
        """Returns when the tensors are written, or with `checkpoint.async_save` when they are staged."""

    def saved(self) -> Awaitable[bool]:
        """Whether the staged tensors are all written. Raises CheckpointError when they cannot be."""

    def finish_save(self) -> Awaitable[None]:
        """Returns when they are. Raises like `saved`."""


@dataclass(frozen=True, kw_only=True)
class _Pending:
    iteration: int
    state: Mapping[str, Any]
    best: int | None
    files: Mapping[str, bytes]


class Checkpoints:
    """At most one save is in flight; what goes wrong in it is raised by the next call."""

    def __init__(self, root: Path, trainer: SavingTrainer, config: RlCheckpointConfig) -> None:
        self._root, self._trainer, self._config = root, trainer, config
        self._pending: _Pending | None = None
        self._publishing: asyncio.Task[Path] | None = None

    async def save(
        self, iteration: int, state: Mapping[str, Any], *, best: int | None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Take the checkpoint of `iteration` with this state of the driver, and these files of it."""
        await self.finish()
        await self._trainer.save(self._root, iteration)
        pending = _Pending(iteration=iteration, state=state, best=best, files=files or {})
        if self._config.async_save:
            self._pending = pending
        else:
            self._publish(pending)()

    async def poll(self) -> None:
        """Publish what is written by now. Called between iterations; waits for nothing."""
        if self._publishing is not None and self._publishing.done():
            done, self._publishing = self._publishing, None
            done.result()
        if self._pending is not None and await self._trainer.saved():
            self._begin()

    async def finish(self) -> None:
        """Returns when nothing is in flight."""
        if self._pending is not None:
            await self._trainer.finish_save()
            self._begin()
        if self._publishing is not None:
            last, self._publishing = self._publishing, None
            await last

    async def close(self) -> None:
        """What is written is still published, and what a trainer has only staged is forgotten. Raises nothing of it."""
        self._pending = None
        if self._publishing is not None:
            await asyncio.wait({self._publishing})

    def _begin(self) -> None:
        assert self._pending is not None
        # Checksums of all files: seconds for a large model, in a thread.
        publish = self._publish(self._pending)
        self._pending = None
        self._publishing = asyncio.create_task(asyncio.to_thread(publish), name="publish checkpoint")

    def _publish(self, pending: _Pending) -> Callable[[], Path]:
        def publish() -> Path:
            return checkpoint.publish(
                self._root,
                pending.iteration,
                pending.state,
                keep=self._config.keep,
                best=pending.best,
                files=pending.files,
            )

        return publish
