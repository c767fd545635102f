"""trained.jsonl: which samples each iteration was trained on. One line an iteration, as a run that was never disturbed
writes it: what a resumed run makes again, it writes again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from verst.config.recipe import RlRecipe
from verst.loops.batch import Batch, reward_weights
from verst.obs.json_lines import Kind, keep_rows, read_rows
from verst.rollout.filters import weighted_sums
from verst.rollout.sampler import Rollout

_KEYS: Mapping[str, Kind] = {"iteration": int, "groups": list}


def ledger_row(recipe: RlRecipe, iteration: int, rollout: Rollout, batch: Batch) -> dict[str, Any]:
    """Of one iteration: for each group its number, the filter that dropped it, and of its samples by turns index, weight
    version, reward (null: none) and whether it counts in the loss."""
    weights = reward_weights(recipe)
    return {
        "iteration": iteration,
        "groups": [
            {
                "rollout": group.rollout,
                "group": group.index,
                "dropped_by": dropped_by,
                "indices": [sample.key.index for sample in group.samples],
                "versions": [sample.weight_version for sample in group.samples],
                "rewards": [v if math.isfinite(v) else None for v in weighted_sums(group.rewards(), weights)],
                "counts": [bool(counts) for counts in mask],
            }
            for group, dropped_by, mask in zip(rollout.groups, rollout.dropped_by, batch.advantages.mask, strict=True)
        ],
    }


class Ledger:
    """Appends to the file; a half-written last line is dropped with what `truncate_after` drops."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def truncate_after(self, iteration: int) -> None:
        """A run that goes on after `iteration` makes the later ones again."""
        self.close()
        keep_rows(self._path, _KEYS, lambda row: row["iteration"] <= iteration)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """All complete lines; none where there is no file. Raises CheckpointError for a damaged one."""
    return read_rows(path, _KEYS)


def ledger_faults(
    rows: Sequence[Mapping[str, Any]], *, iterations: int, groups: int, group_size: int, staleness: int
) -> Iterator[str]:
    """One line for each thing that must not be in it. groups: of a rollout, 0 = any number (dynamic sampling)."""
    found = [row["iteration"] for row in rows]
    if found != list(range(1, iterations + 1)):
        yield f"iterations are {_short(found)}, not 1..{iterations}, each once"
    trained: dict[tuple[int, int], int] = {}
    for row in rows:
        number = row["iteration"]
        if groups and len(row["groups"]) != groups:
            yield f"iteration {number}: {len(row['groups'])} groups, not {groups}"
        for group in row["groups"]:
            name = f"iteration {number}: group {group['rollout']}.{group['group']}"
            if group["indices"] != list(range(group_size)):
                yield f"{name} holds samples {_short(group['indices'])}, not 0..{group_size - 1}, each once"
                continue
            lags = {number - 1 - version for version in group["versions"]}
            if min(lags) < 0 or max(lags) > staleness:
                yield f"{name} is of weight versions {_short(group['versions'])}"
            if group["dropped_by"] is not None:
                continue
            unscored = [
                index
                for index, reward, counts in zip(group["indices"], group["rewards"], group["counts"], strict=True)
                if counts and reward is None
            ]
            if unscored:
                yield f"{name}: samples {unscored} have no reward and were trained on"
            key = (group["rollout"], group["group"])
            if key in trained:
                yield f"{name} was trained on in iteration {trained[key]} already"
            trained[key] = number


def _short(values: Sequence[Any]) -> str:
    text = ", ".join(map(str, values))
    return text if len(text) <= 80 else f"{text[:77]}..."
