"""Engines as processes: one actor each, or one for each of its ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from verst.cluster.calls import all_of, result_of

_log = logging.getLogger(__name__)


class EngineProcesses:
    """The ranks of one engine, as actors. It lives as long as all of them do."""

    def __init__(self, lead: Any, followers: Sequence[Any], *, lost: Callable[[Any, str], None]) -> None:
        """lost: called with the first rank and the reason when one that follows has failed; it ends the engine."""
        self.actors = [lead, *followers]
        self._lead, self._followers, self._lost = lead, list(followers), lost
        self._watch: asyncio.Task[list[Any]] | None = None

    async def start(self, timeout_s: float, loan: Any) -> str:
        """The URL, once all ranks have loaded the model. loan: of a trainer rank, for an engine of one rank.

        Raises what any of them raises.
        """
        if not self._followers:
            url: str = await result_of(self._lead.start.remote(timeout_s, loan), role="engine")
            return url
        host, port = await result_of(self._lead.open.remote(), role="engine")
        roles = ["engine", *(f"engine rank {rank}" for rank in range(1, len(self.actors)))]
        starts = [actor.start.remote(host, port) for actor in self._followers]
        url, *_ = await all_of([self._lead.start.remote(timeout_s, loan), *starts], roles=roles)
        follows = [actor.follow.remote() for actor in self._followers]
        self._watch = asyncio.create_task(all_of(follows, roles=roles[1:]), name="verst-engine-ranks")
        self._watch.add_done_callback(self._ended)
        return url

    def _ended(self, watch: asyncio.Task[list[Any]]) -> None:
        if watch.cancelled() or watch.exception() is None:
            return
        # Rank 0 may wait for the lost one in the middle of a forward, and a GPU waits long.
        _log.error("a rank of an engine ended", exc_info=watch.exception())
        self._lost(self._lead, str(watch.exception()))

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
