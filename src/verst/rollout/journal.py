"""Sampled groups that outlive the process: files of a checkpoint, from which they are made again bit for bit.

`index.json` of a folder says which they are (prompt position, rollout, number) and how they were scored; each
microgroup's engine answer lies beside it as an engine sends it. What a group's requests were follows from the recipe, as it did
the first time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verst.engine.wire import Answer
from verst.errors import CheckpointError
from verst.rollout.pipeline import Parse, ScoredMicrogroup, assemble
from verst.rollout.plan import MicrogroupTask
from verst.types import Group, Scores

_INDEX = "index.json"
PlanOf = Callable[[int, int, int], Sequence[MicrogroupTask]]
"""(prompt position, rollout, number of the group) -> its microgroups."""


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """A complete group and what it takes to make it again."""

    position: int
    """Of its prompt."""
    group: Group
    scored: tuple[ScoredMicrogroup, ...]
    """In index order."""


def sampled_group(position: int, scored: Sequence[ScoredMicrogroup], *, group_size: int) -> SampledGroup:
    """Raises InvariantError for a group with a hole."""
    (group,) = assemble(scored, group_size=group_size)
    return SampledGroup(position=position, group=group, scored=tuple(scored))


def to_files(groups: Sequence[SampledGroup], folder: str) -> dict[str, bytes]:
    """Path in the checkpoint, all inside `folder` -> content; nothing for no group."""
    files: dict[str, bytes] = {}
    index = []
    for item in groups:
        rows = []
        for number, scored in enumerate(item.scored):
            assert scored.answer is not None, "a pipeline whose groups are journaled keeps its answers"
            name = f"{folder}/{item.group.rollout}_{item.group.index}_{number}.msgpack"
            files[name] = scored.answer.portable()
            scores = {"by_reward": scored.scores.by_reward, "num_failures": scored.scores.num_failures}
            rows.append({"file": name, "scores": scores})
        index.append(
            {
                "position": item.position,
                "rollout": item.group.rollout,
                "group": item.group.index,
                "microgroups": rows,
            }
        )
    if index:
        # NaN is what Python's JSON writes and reads for a masked score.
        files[f"{folder}/{_INDEX}"] = json.dumps(index, indent=1).encode()
    return files


async def from_files(
    root: Path, folder: str, *, plan: PlanOf, parse: Parse, group_size: int
) -> tuple[SampledGroup, ...]:
    """The groups in `folder` of the verified checkpoint `root`, in the order in which they were written; none where it
    has none.

    Raises CheckpointError for files that do not fit the recipe.
    """
    path = root / folder / _INDEX
    if not path.exists():
        return ()
    index: list[Mapping[str, Any]] = json.loads(path.read_text())
    groups = []
    for entry in index:
        tasks = plan(entry["position"], entry["rollout"], entry["group"])
        rows = entry["microgroups"]
        if len(tasks) != len(rows):
            raise CheckpointError(
                f"{path}: group {entry['group']} of rollout {entry['rollout']} has {len(rows)} microgroups, the "
                f"recipe makes {len(tasks)}"
            )
        scored = [await _restored(root, task, row, parse) for task, row in zip(tasks, rows, strict=True)]
        groups.append(sampled_group(entry["position"], scored, group_size=group_size))
    return tuple(groups)


async def _restored(root: Path, task: MicrogroupTask, row: Mapping[str, Any], parse: Parse) -> ScoredMicrogroup:
    answer = Answer(body=(root / row["file"]).read_bytes())
    scores = row["scores"]
    by_reward = {name: tuple(values) for name, values in scores["by_reward"].items()}
    return ScoredMicrogroup(
        task=task,
        microgroup=await parse(answer, task.keys),
        scores=Scores(by_reward=by_reward, num_failures=scores["num_failures"]),
        answer=answer,
    )
