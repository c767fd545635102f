"""`verst trace` and `verst triage`: where the time of a run went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verst.obs.spans import Span


def trace(run: Path, out: Path | None) -> None:
    from verst.obs.trace import write_trace

    spans = spans_of(run)
    path = out or run / "trace.json"
    write_trace(spans, path)
    print(f"{path}: {len(spans)} spans; open it at https://ui.perfetto.dev or in chrome://tracing")


def spans_of(run: Path) -> list[Span]:
    """Raises ConfigError for a folder without any."""
    from verst.errors import ConfigError
    from verst.obs.spans import FILE, read_spans

    spans = read_spans(run)
    if not spans:
        raise ConfigError(f"{run / 'events' / FILE} is missing or holds no spans; name the folder of an RL run")
    return spans
