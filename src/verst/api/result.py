"""What a run has come to, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verst.config import RlRecipe, SftRecipe
from verst.obs import metrics


@dataclass(frozen=True, kw_only=True)
class Result:
    folder: Path
    """The run folder."""
    recipe: RlRecipe | SftRecipe
    """As the run folder keeps it."""
    metrics: list[dict[str, Any]]
    """The rows of metrics.jsonl, one an iteration, oldest first; names in docs/metrics.md."""
    complete: bool
    """False for a run that was stopped or goes on: training again goes on with it."""
    why: str | None
    """Why the watch ended it early, in words."""
    checkpoint: Path | None
    """The newest."""
    model: Path | None
    """The pipeline folder that a complete SFT run wrote."""

    @classmethod
    def of(cls, run: str | Path) -> Result:
        """Of a run folder, whoever trains in it. Raises ConfigError for another folder, CheckpointError for a damaged one."""
        from verst.loops.run_folder import finished, stored_recipe
        from verst.trainer.checkpoint import published

        folder = Path(run)
        recipe = stored_recipe(folder)
        summary = finished(folder, recipe)
        checkpoints, model = published(folder / "checkpoints"), folder / "pipeline"
        return cls(
            folder=folder,
            recipe=recipe,
            metrics=metrics.read_metrics(folder / "metrics.jsonl"),
            complete=summary is not None,
            why=None if summary is None else summary.get("why"),
            checkpoint=checkpoints[-1] if checkpoints else None,
            model=model if summary is not None and model.exists() else None,
        )

    @property
    def iterations(self) -> int:
        """Done and reported."""
        return int(self.metrics[-1][metrics.ITERATION]) if self.metrics else 0

    @property
    def heldout_before(self) -> float | None:
        """First held-out reward; None where none was measured."""
        return next(iter(self._heldout()), None)

    @property
    def heldout_after(self) -> float | None:
        """Last held-out reward."""
        return next(reversed(self._heldout()), None)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Iterations that have a finite value of this metric, and the values."""
        return metrics.series(self.metrics, name)

    def _heldout(self) -> list[float]:
        from verst.config.watch import HELDOUT

        return self.series(HELDOUT)[1]
