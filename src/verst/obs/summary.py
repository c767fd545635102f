"""The last thing a run says: what changed, how long it took, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from verst.obs.progress import duration


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    name: str
    iterations: int
    """Done in all, earlier processes of a resumed run included."""
    seconds: float
    """Wall time of this process."""
    heldout_before: float | None
    heldout_after: float | None
    paths: Mapping[str, Path]
    """What to open: label -> file or folder."""
    notes: tuple[str, ...] = ()
    """Things to know, e.g. masked samples."""


def print_summary(summary: RunSummary, console: Console | None = None) -> None:
    """A panel in a terminal, plain lines elsewhere: paths are never broken over lines there."""
    console = console or Console()
    rows = summary_rows(summary)
    if not console.is_terminal:
        for label, text in rows:
            console.print(f"{label}: {text}", soft_wrap=True, markup=False, highlight=False)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, Text(text))
    console.print(Panel(table, title=Text(summary.name), expand=False))


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Label and text of each line."""
    rows = []
    before, after = summary.heldout_before, summary.heldout_after
    if before is not None and after is not None:
        rows.append(("held-out reward", f"{before:.3f} -> {after:.3f} ({after - before:+.3f})"))
    rows.append(("iterations", f"{summary.iterations} in {duration(summary.seconds)}"))
    rows += [("note", note) for note in summary.notes]
    rows += [(label, str(path)) for label, path in summary.paths.items()]
    return rows
