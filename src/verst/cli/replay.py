"""`verst replay`: recorded iterations made again and compared."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

_SHOWN = 20
"""Differences that are listed."""


def run(folder: Path, iteration: int | None) -> None:
    from verst.loops.replay import replay

    found = asyncio.run(replay(folder, iteration))
    tensors = "no checkpoint of it to compare" if found.tensors is None else f"{found.tensors} tensors compared"
    print(f"iterations {found.first} to {found.last} made again: {found.metrics} metrics and {tensors}")
    if not found.differences:
        print("The same, bit for bit.")
        return
    for line in found.differences[:_SHOWN]:
        print(f"    {line}")
    print(f"{len(found.differences)} differences")
    sys.exit(1)
