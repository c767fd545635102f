"""Rollouts that are begun before they are trained on.

    begin ─> engines ─> generated (new weights may come) ─> scored ─> take ─> trainer

One weight version samples at a time: `begin` what it is to sample, `drained` before the engines get another. Which version
samples which rollout is thereby a matter of numbers, never of timing. A checkpoint holds the rollouts that are begun and
not yet taken as the engines' own bytes, so that a resumed run trains on what the killed one would have trained on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verst.config.recipe import RlRecipe
from verst.errors import ConfigError, InvariantError
from verst.rollout import journal
from verst.rollout.pipeline import Parse, StageSeconds
from verst.rollout.sampler import Rollout, Sampler, Standing

_KEPT = "sampled"
"""Folder of a checkpoint with the groups that dynamic sampling has left over."""


@dataclass(kw_only=True)
class _Begun:
    number: int
    generated: asyncio.Future[None]
    """Done when engines have nothing more to do for it."""
    task: asyncio.Task[Rollout] = field(init=False)
    end: Standing | None = None
    """What it leaves; None until that is known."""


class Ahead:
    """Rollouts by number, from `begin` to `take`, each in order."""

    def __init__(self, recipe: RlRecipe, sampler: Sampler) -> None:
        self._recipe = recipe
        self._sampler = sampler
        self._bound = recipe.schedule.staleness + recipe.rollout.dynamic.staleness
        self._begun: dict[int, _Begun] = {}
        self._next = 0
        self._standing = Standing()
        """Where the first of them began."""
        self._for_rollout = self._for_training = 0.0
        self._free_since = time.perf_counter()
        """When engines last got or finished work."""

    def begin(self, through: int, *, weight_version: int) -> None:
        """Begin the rollouts up to `through` that are not begun yet. weight_version: that the engines hold now."""
        while self._next <= through:
            begun = self._add(self._next)
            begun.task = asyncio.create_task(
                self._sample(begun, self._begun.get(begun.number - 1), weight_version), name=f"rollout {begun.number}"
            )
        self._free_since = time.perf_counter()

    def _add(self, number: int) -> _Begun:
        begun = _Begun(number=number, generated=asyncio.get_running_loop().create_future())
        self._begun[number] = begun
        self._next = number + 1
        return begun

    async def _sample(self, begun: _Begun, before: _Begun | None, weight_version: int) -> Rollout:
        start: Standing | None = self._standing
        if before is not None:
            if before.end is None:
                await asyncio.wait({before.task})
                before.task.result()
            start = before.end
        assert start is not None
        begun.end = self._sampler.known_end(start)

        def on_generated() -> None:
            begun.generated.set_result(None)
            self._free_since = time.perf_counter()

        rollout, begun.end = await self._sampler.rollout(
            begun.number, start, weight_version=weight_version, on_generated=on_generated
        )
        return rollout

    async def take(self, number: int) -> Rollout:
        """Rollout `number`, which is trained on by version `number` of the weights. Raises what sampling it raised, and
        InvariantError for samples of weights that are not within the recipe's bound of it."""
        begun, asked = self._begun[number], time.perf_counter()
        await asyncio.wait({begun.task})
        self._for_rollout += time.perf_counter() - asked
        rollout = begun.task.result()
        lags = [number - sample.weight_version for group in rollout.groups for sample in group.samples]
        if any(not 0 <= lag <= self._bound for lag in lags):
            raise InvariantError(
                f"rollout {number} holds samples of weight versions {number - max(lags)} to {number - min(lags)}; the "
                f"recipe trains version {number} on samples that are at most {self._bound} behind (schedule.staleness and "
                "rollout.dynamic.staleness)"
            )
        del self._begun[number]
        assert begun.end is not None
        self._standing = begun.end
        staleness = {
            "rollout/staleness_mean": sum(lags) / len(lags) if lags else 0.0,
            "rollout/staleness_max": float(max(lags, default=0)),
        }
        return dataclasses.replace(rollout, metrics={**rollout.metrics, **staleness})

    async def drained(self) -> None:
        """Returns when engines have nothing to do, so that their weights may change. Raises what sampling raised."""
        asked = time.perf_counter()
        if all(begun.generated.done() for begun in self._begun.values()):
            self._for_training += asked - self._free_since
        for begun in self._begun.values():
            either: set[asyncio.Future[Any]] = {begun.task, begun.generated}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if begun.task.done():
                begun.task.result()
        self._for_rollout += time.perf_counter() - asked

    def waits(self) -> dict[str, float]:
        """Seconds that the trainer waited for rollouts, and engines for the trainer, since the last call."""
        waits = {"perf/wait_for_rollout_s": self._for_rollout, "perf/wait_for_training_s": self._for_training}
        self._for_rollout = self._for_training = 0.0
        return waits

    async def settle(self, *, below: int) -> None:
        """Give up the rollouts from `below` on, and wait for the others to be complete. Raises what sampling raised."""
        await self._give_up(below)
        for begun in self._begun.values():
            await asyncio.wait({begun.task})
            begun.task.result()

    async def forget(self) -> int:
        """Give up all that is not taken and all kept groups; how many groups that were, complete ones. Raises what
        sampling raised."""
        complete = [begun.task.result() for begun in self._begun.values() if begun.task.done()]
        number = len(self._standing.kept) + sum(len(rollout.sampled) for rollout in complete)
        await self._give_up(0)
        self._standing = Standing(position=self._standing.position)
        return number

    async def _give_up(self, first: int) -> None:
        doomed = [self._begun.pop(number) for number in [*self._begun] if number >= first]
        for begun in doomed:
            begun.task.cancel()
        await asyncio.gather(*(begun.task for begun in doomed), return_exceptions=True)
        self._next = min([self._next, *(begun.number for begun in doomed)])

    async def close(self) -> None:
        """Nothing goes on after this, whatever it would have raised."""
        await self._give_up(0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint's run state says under `sampler`, besides `files`. After `settle`."""
        ahead = []
        for begun in self._begun.values():
            assert begun.end is not None
            rollout = begun.task.result()
            ahead.append(
                {
                    "number": begun.number,
                    "end": begun.end.position,
                    "dropped_by": rollout.dropped_by,
                    "metrics": rollout.metrics,
                    "seconds": dataclasses.asdict(rollout.seconds),
                }
            )
        return {"position": self._standing.position, "ahead": ahead}

    def files(self) -> dict[str, bytes]:
        """The groups of those rollouts, and the kept ones, as files of a checkpoint."""
        ends = [begun.end for begun in self._begun.values() if begun.end is not None]
        files = journal.to_files([self._standing, *ends][-1].kept, _KEPT)
        for begun in self._begun.values():
            files |= journal.to_files(begun.task.result().sampled, _folder(begun.number))
        return files

    async def restore(self, state: Mapping[str, Any], folder: Path, parse: Parse) -> None:
        """Go on from a verified checkpoint; state: all of its run state. Raises CheckpointError."""

        async def groups(name: str) -> tuple[journal.SampledGroup, ...]:
            size = self._recipe.rollout.group_size
            return await journal.from_files(folder, name, plan=self._sampler.plan, parse=parse, group_size=size)

        kept = await groups(_KEPT)
        ahead: Sequence[Mapping[str, Any]] = state.get("sampler", {}).get("ahead", ())
        self._standing = Standing(
            position=position_of(self._recipe, state, state["iteration"]), kept=() if ahead else kept
        )
        self._next = state["iteration"]
        for entry in ahead:
            begun = self._add(entry["number"])
            begun.end = Standing(position=entry["end"], kept=kept if entry is ahead[-1] else ())
            begun.generated.set_result(None)
            seconds = entry["seconds"]
            rollout = Rollout(
                sampled=await groups(_folder(begun.number)),
                dropped_by=tuple(entry["dropped_by"]),
                seconds=StageSeconds(total=seconds["total"], last_generated=seconds["last_generated"]),
                metrics=entry["metrics"],
            )
            begun.task = asyncio.create_task(_as_it_is(rollout), name=f"rollout {begun.number}")


def _folder(number: int) -> str:
    return f"ahead/{number}"


async def _as_it_is(rollout: Rollout) -> Rollout:
    return rollout


def position_of(recipe: RlRecipe, state: Mapping[str, Any], number: int) -> int:
    """The prompt position at which rollout `number` began or will begin, from the run state of a checkpoint.

    Without dynamic sampling it is known of every rollout; otherwise of those that the checkpoint holds, and the one after
    them. Raises ConfigError for another one.
    """
    if not recipe.rollout.dynamic.enabled:
        return number * recipe.rollout.num_groups
    sampler = state["sampler"]
    known = {state["iteration"]: sampler["position"]}
    known |= {entry["number"] + 1: entry["end"] for entry in sampler.get("ahead", ())}
    if number not in known:
        raise ConfigError(
            f"the checkpoint of iteration {state['iteration']} does not say where among the prompts iteration {number + 1} "
            f"began: dynamic sampling has no fixed number of prompts; it knows of {', '.join(str(n + 1) for n in known)}"
        )
    position: int = known[number]
    return position


def version_of(number: int, *, staleness: int, rollbacks: Sequence[int]) -> int:
    """The weight version that samples rollout `number`; rollbacks: iterations after which weights were taken back."""
    return max(0, number - staleness, *(iteration for iteration in rollbacks if iteration <= number))
