"""The commands of who begins: is the machine fit, and which recipe to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add_commands(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL_OR_RECIPE]", help="Also: is this model folder whole, does this recipe fit here."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check Python, packages, GPUs, disk, shared memory, limits and ports, and say what to do; exits 1 where one fails."""
    from verst.cli import doctor as command

    if not command.run(target, as_json=as_json):
        raise typer.Exit(1)
