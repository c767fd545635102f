"""Which faults a run survives, and which processes hang.

A process with work that makes no progress for its limit is ended; whoever waits for it then brings it back like one that
was killed. Progress is what the process counts (denoising steps, tiles) or what comes back from it (answers, scores).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verst.cluster.diagnosis import kernel_kills, likely_cause
from verst.config.supervision import SupervisionConfig
from verst.errors import ProcessDied

Event = Mapping[str, str | int | float]
Kind = Literal["engine", "router", "trainer", "parser", "reward"]
OnEvent = Callable[[str, Event], None]
"""(name, attributes)"""


@dataclass(kw_only=True)
class Watched:
    """One process, as it is seen from here."""

    limit_s: float
    key: str
    """That sets the limit."""
    has_work: Callable[[], bool]
    progress: Callable[[], Any]
    """Any value; another one than before is progress."""
    end: Callable[[], None]
    """Make an end of it, for it hangs."""
    seen: Any = None
    stalled_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A process that has ended or was ended."""

    kind: Kind
    process: str
    reason: str
    log: Sequence[str] = field(default_factory=tuple)
    """Its last lines."""


class Supervisor:
    """Use `watch` for each process and `run` beside the work; `fault` before one is brought back."""

    def __init__(
        self,
        config: SupervisionConfig,
        *,
        on_event: OnEvent = lambda name, event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._on_event, self._clock = config, on_event, clock
        self._watched: dict[str, Watched] = {}
        self._faults: dict[str, deque[float]] = {}
        self._hung: dict[str, str] = {}
        self._restarts: dict[Kind, int] = {}
        self._kernel_kills = kernel_kills()

    @property
    def enabled(self) -> bool:
        return self._config.enabled

    def watch(self, process: str, watched: Watched) -> None:
        """From now on, in the place of the one that had this name."""
        self._watched[process] = watched

    def forget(self, process: str) -> None:
        self._watched.pop(process, None)

    async def run(self) -> None:
        """Until cancelled."""
        last = self._clock()
        while self.enabled:
            await asyncio.sleep(self._config.poll_s)
            now = self._clock()
            # A driver that was itself held up has not watched for so long.
            self.look(min(now - last, 2 * self._config.poll_s))
            last = now

    def look(self, elapsed_s: float) -> None:
        """At each process, `elapsed_s` after the last time."""
        for process, watched in [*self._watched.items()]:
            progress = watched.progress()
            if not watched.has_work() or progress != watched.seen:
                watched.seen, watched.stalled_s = progress, 0.0
                continue
            watched.stalled_s += elapsed_s
            if watched.stalled_s > watched.limit_s:
                said = f"made no progress for {watched.stalled_s:.0f} s ({watched.key} = {watched.limit_s:g})"
                watched.stalled_s = 0.0
                self.hangs(process, said)
                watched.end()

    def hangs(self, process: str, reason: str) -> None:
        """It is about to be ended for that: its next fault is this."""
        self._hung[process] = reason
        self._on_event("hang", {"process": process, "reason": reason})

    def fault(self, fault: Fault, *, last: bool = False) -> None:
        """Count it. Raises ProcessDied, with a diagnosis, where it is one too many, where supervision is off, and where it is
        the last, for nothing is there yet that a new process could go on from."""
        hung = self._hung.pop(fault.process, None)
        now_killed = kernel_kills()
        cause = likely_cause(
            fault.reason, fault.log, kernel_kills=now_killed - self._kernel_kills, unanswered=hung is not None
        )
        self._kernel_kills = now_killed
        reason = hung or fault.reason
        now = self._clock()
        recent = self._faults.setdefault(fault.process, deque())
        while recent and now - recent[0] > self._config.window_s:
            recent.popleft()
        recent.append(now)
        final = last or not self.enabled or len(recent) > self._config.restarts
        self._on_event(
            "fault",
            {"kind": fault.kind, "process": fault.process, "reason": reason, "cause": cause, "final": int(final)},
        )
        if final:
            often = "while the run started: " if last else self._often(len(recent))
            log = "".join(f"\n    {line}" for line in fault.log) or " none"
            raise ProcessDied(
                f"the {fault.process} process ended {often}{reason}\n  likely cause: {cause}\n  its last log lines:{log}"
            )
        self._restarts[fault.kind] = self._restarts.get(fault.kind, 0) + 1

    def restarted(self, process: str, *, seconds: float) -> None:
        self._on_event("restart", {"process": process, "seconds": seconds})

    def metrics(self) -> dict[str, float]:
        """Since this driver started; kinds that never came back are absent."""
        return {f"supervision/restarts/{kind}": float(number) for kind, number in self._restarts.items()}

    def _often(self, times: int) -> str:
        if not self.enabled:
            return ""
        return (
            f"{times} times in {self._config.window_s:g} s, more than supervision.restarts = {self._config.restarts}; "
            "the last time: "
        )
