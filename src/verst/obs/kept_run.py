"""Which run of a tracking service is this run folder's, however many processes write it."""

from __future__ import annotations

import importlib
import os
import secrets
from pathlib import Path
from typing import Any


class KeptRun:
    """One run of a service for each run folder: its id and the last iteration that the service was told of are kept there."""

    def __init__(self, folder: Path, service: str) -> None:
        self._id = folder / f"{service}_id"
        self._told = folder / f"{service}_told"
        self._before = int(self._told.read_text()) if self._told.exists() else -1

    @property
    def id(self) -> str | None:
        """None before `keep`."""
        return self._id.read_text() if self._id.exists() else None

    def keep(self, run_id: str) -> None:
        _write(self._id, run_id)

    def own_id(self) -> str:
        """The id, drawn here where there is none yet."""
        if self.id is None:
            self.keep(secrets.token_hex(4))
        return self._id.read_text()

    def is_news(self, iteration: int) -> bool:
        """False for an iteration that is made again after an earlier process told of it: its first values stay."""
        return iteration > self._before

    def told(self, iteration: int) -> None:
        _write(self._told, str(iteration))


def package(name: str) -> Any:
    """An optional package, imported only where it is asked for; `verst.loops.trackers` has looked for it before."""
    return importlib.import_module(name)


def _write(path: Path, text: str) -> None:
    # By rename: a process killed here leaves the file as it was.
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)
