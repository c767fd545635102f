"""What a command does while it prints nothing: a line in the terminal that goes away again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Tell(Protocol):
    def __call__(self, text: str, *, done: int = 0, total: int | None = None) -> None:
        """What goes on now, and how far it is where that is known. From any thread."""


def nobody(text: str, *, done: int = 0, total: int | None = None) -> None:
    """Nobody looks."""


@contextmanager
def waiting(*, quiet: bool = False, console: Console | None = None) -> Iterator[Tell]:
    """A spinner with words, a bar where there is a total, and the seconds so far. On stderr: a command's result stays its
    whole output.

    Nothing where stderr is no terminal, or with `quiet`.
    """
    if quiet:
        yield nobody
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    screen = console or Console(stderr=True)
    if not screen.is_terminal:
        yield nobody
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen, transient=True, redirect_stdout=False) as shown:
        line = shown.add_task("starting", total=None, count="")

        def tell(text: str, *, done: int = 0, total: int | None = None) -> None:
            count = "" if total is None else f"{done}/{total}"
            # New words are drawn at once: what is over before the next redrawing is seen too.
            new = text != shown.tasks[0].description
            shown.update(line, description=text, completed=done, total=total, count=count, refresh=new)

        yield tell
