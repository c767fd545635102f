"""The rules of GenEval (arXiv 2310.11513): what must be seen in a picture, and when it is; pure functions of detections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
POSITIONS = ("left of", "right of", "above", "below")
_SLACK = 0.1
"""Share of the two boxes' summed size by which centres must be apart before an offset counts."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One detected object."""

    box: tuple[float, float, float, float]
    """Left, top, right, bottom, in pixels."""
    score: float
    """Confidence in [0, 1]."""
    mask: np.ndarray | None = None
    """bool [H, W] where the detector segments."""


Objects = Mapping[str, Sequence[Found]]
"""Class -> its objects, the most confident first."""
ColorsOf = Callable[[Sequence[Found], str], list[str]]
"""Objects of one class, and that class -> the colour of each."""


def strict(metadata: Mapping[str, Any], objects: Objects, colors_of: ColorsOf) -> float:
    """1.0 if all is as asked for, else 0.0: GenEval's own rule.

    Of each `include` clause the `count` most confident objects are looked at: there must be that many, all of the colour,
    and each in the relation to all objects of the clause it names. Of each `exclude` clause there must be fewer than
    `count`: so counting is exact, and elsewhere more objects do no harm.
    """
    groups: list[Sequence[Found] | None] = []
    for clause in metadata["include"]:
        found = objects.get(clause["class"], ())[: clause["count"]]
        right = len(found) == clause["count"]
        if right and "color" in clause:
            right = colors_of(found, clause["class"]).count(clause["color"]) == clause["count"]
        if right and "position" in clause:
            right = _placed(found, clause["position"], groups)
        groups.append(found if right else None)
    unwanted = any(len(objects.get(c["class"], ())) >= c["count"] for c in metadata.get("exclude", ()))
    return float(None not in groups and not unwanted)


def soft(metadata: Mapping[str, Any], objects: Objects, colors_of: ColorsOf) -> float:
    """Mean of partial credits, at most 1: the reward that Flow-GRPO (arXiv 2505.05470) trains with.

    Each `include` clause gives 1 - |found - count| / count, negative where there are more than twice too many. One with a
    colour or a position gives a second credit, 0 unless the count is right: for a colour 1 - |of that colour - count| / count,
    for a position 1 or 0. `exclude` is not read: a count that must be exact says it already.
    Flow-GRPO's code gives a wrong position the two credits 0 and 1; here it is one credit of 0.
    """
    marks: list[float] = []
    groups: list[Sequence[Found] | None] = []
    for clause in metadata["include"]:
        found, count = objects.get(clause["class"], ()), clause["count"]
        marks.append(1 - abs(count - len(found)) / count)
        right = len(found) == count
        if "color" in clause:
            matching = colors_of(found, clause["class"]).count(clause["color"]) if right else 0
            marks.append(1 - abs(count - matching) / count)
            right = right and matching == count
        if "position" in clause:
            right = right and _placed(found, clause["position"], groups)
            marks.append(float(right))
        groups.append(found if right else None)
    return sum(marks) / len(marks)


def _placed(found: Sequence[Found], position: Sequence[Any], groups: Sequence[Sequence[Found] | None]) -> bool:
    relation, index = position
    targets = groups[index]
    return targets is not None and all(relation in relations(a.box, b.box) for a in found for b in targets)


def relations(a: Sequence[float], b: Sequence[float]) -> set[str]:
    """How box a lies to box b: of an offset of centres, what exceeds a tenth of the summed sizes, by its direction.

    An axis counts when the remainder along it is more than half of the offset's length, so a diagonal counts twice.
    """
    box_a, box_b = np.asarray(a, dtype=float).reshape(2, 2), np.asarray(b, dtype=float).reshape(2, 2)
    offset = box_a.mean(axis=0) - box_b.mean(axis=0)
    sizes = np.abs(box_a[1] - box_a[0]) + np.abs(box_b[1] - box_b[0])
    rest = np.maximum(np.abs(offset) - _SLACK * sizes, 0) * np.sign(offset)
    if np.all(np.abs(rest) < 1e-3):
        return set()
    dx, dy = rest / np.linalg.norm(offset)
    seen = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {name for name, holds in seen.items() if holds}


def clause_problem(metadata: Mapping[str, Any], classes: set[str]) -> str | None:
    """What is wrong with a row of GenEval's JSONL, or None; classes: what the detector knows."""
    if not isinstance(metadata.get("tag"), str):
        return "has no tag"
    include = metadata.get("include")
    if not isinstance(include, Sequence) or isinstance(include, str) or not include:
        return "has no list `include`"
    exclude = metadata.get("exclude", ())
    for index, clause in enumerate([*include, *exclude]):
        problem = _one_clause(clause, index, classes)
        if problem:
            return problem
    return None


def _one_clause(clause: Any, index: int, classes: set[str]) -> str | None:
    if not isinstance(clause, Mapping) or "class" not in clause:
        return f"clause {index} has no class"
    if clause["class"] not in classes:
        return f"class {clause['class']!r} is unknown to the detector"
    if not isinstance(clause.get("count"), int) or clause["count"] < 1:
        return f"clause {index} has count = {clause.get('count')!r}, needed is a whole number from 1"
    if "color" in clause and clause["color"] not in COLORS:
        return f"color {clause['color']!r} is none of {', '.join(COLORS)}"
    if "position" in clause:
        position = clause["position"]
        right = isinstance(position, Sequence) and len(position) == 2 and position[0] in POSITIONS
        if not right or not isinstance(position[1], int) or not 0 <= position[1] < index:
            return f"position {position!r} is not [{' | '.join(POSITIONS)}, number of an earlier clause]"
    return None
