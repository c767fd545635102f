"""The command in this process, for tests that would otherwise load torch once more."""

from __future__ import annotations

import sys

import pytest

from verst.cli.main import main


def here(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `verst ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["verst", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)
