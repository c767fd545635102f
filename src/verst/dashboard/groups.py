"""Groups of each iteration, and bands over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_TOTAL = "total"


class GroupStore:
    """The newest event of every group: a resumed run makes some again."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._groups: dict[int, dict[int, dict[str, Any]]] = {}

    def add(self, events: Iterable[Mapping[str, Any]]) -> set[int]:
        """The iterations that these events (`obs.groups.add_group`) change."""
        changed = set()
        for event in events:
            iteration, group = event.get("iteration"), event.get("group")
            if isinstance(iteration, int) and isinstance(group, int):
                row = {key: value for key, value in event.items() if key not in ("time_s", "name", "iteration")}
                self._groups.setdefault(iteration, {})[group] = row
                changed.add(iteration)
        return changed

    def iterations(self) -> list[int]:
        return sorted(self._groups)

    def of(self, iteration: int) -> list[dict[str, Any]]:
        """Rows of the groups of one iteration, by number."""
        return [row for _, row in sorted(self._groups.get(iteration, {}).items())]

    def band(self, iteration: int) -> dict[str, Any]:
        """reward name, or `total` -> [least sample, least group mean, its quartiles 1, 2, 3, largest, largest sample].

        A reward without a finite score in this iteration is absent.
        """
        rows = self.of(iteration)
        found: dict[str, Any] = {}
        for name in [_TOTAL, *{key.removesuffix("/mean") for row in rows for key in row if key.endswith("/mean")}]:
            prefix = "" if name == _TOTAL else f"{name}/"
            scored = [row for row in rows if row.get(f"{prefix}mean") is not None]
            if scored:
                means = np.percentile([row[f"{prefix}mean"] for row in scored], [0, 25, 50, 75, 100]).tolist()
                low = min(row[f"{prefix}min"] for row in scored)
                found[name] = [low, *means, max(row[f"{prefix}max"] for row in scored)]
        return {"iteration": iteration, "num": len(rows), "bands": found}
