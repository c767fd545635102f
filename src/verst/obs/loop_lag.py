"""How late an event loop wakes what is due: the time for which something else held it."""

from __future__ import annotations

import asyncio
import time


class LoopLag:
    """Sleeps again and again on the running loop, and measures by how much it oversleeps."""

    def __init__(self, *, every_s: float = 0.02) -> None:
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None
        self._reset()

    def start(self) -> None:
        """On the running loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="loop-lag")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def metrics(self) -> dict[str, float]:
        """Since the last call of this; nothing where the loop was not watched."""
        if not self._count:
            return {}
        values = {"perf/loop_lag_max_s": self._max_s, "perf/loop_lag_mean_s": self._sum_s / self._count}
        self._reset()
        return values

    def _reset(self) -> None:
        self._max_s, self._sum_s, self._count = 0.0, 0.0, 0

    async def _run(self) -> None:
        while True:
            due = time.perf_counter() + self._every_s
            await asyncio.sleep(self._every_s)
            late = max(0.0, time.perf_counter() - due)
            self._max_s = max(self._max_s, late)
            self._sum_s += late
            self._count += 1
