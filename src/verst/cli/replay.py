"""`verst replay`: recorded iterations made again and compared."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from verst.cli.options import print_json, waiting

_SHOWN = 20
"""Differences that are listed."""


def run(folder: Path, iteration: int | None, *, as_json: bool = False, quiet: bool = False) -> None:
    with waiting(quiet=quiet or as_json) as tell:
        tell(f"reading {folder}")
        from verst.loops.replay import replay

        found = asyncio.run(replay(folder, iteration, tell=tell))
    if as_json:
        print_json(found)
        sys.exit(1 if found.differences else 0)
    tensors = "no checkpoint of it to compare" if found.tensors is None else f"{found.tensors} tensors compared"
    print(f"iterations {found.first} to {found.last} made again: {found.metrics} metrics and {tensors}")
    if not found.differences:
        print("The same, bit for bit.")
        return
    for line in found.differences[:_SHOWN]:
        print(f"    {line}")
    print(f"{len(found.differences)} differences")
    sys.exit(1)
