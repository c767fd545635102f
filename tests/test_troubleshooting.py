"""What docs/troubleshooting.md and docs/migration.md name is there: keys, metrics, pages and commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from verst.cli.main import app
from verst.config import RlRecipe
from verst.config.load import _tables_at

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ["troubleshooting", "migration"]
SECTIONS = tuple(RlRecipe.model_fields)


def quoted(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", (DOCS / f"{page}.md").read_text())


@pytest.mark.parametrize("page", PAGES)
def test_keys_are_keys(page: str) -> None:
    keys = [
        m[0]
        for text in quoted(page)
        if (m := re.match(r"[a-z_]+(\.[a-z_]+)+", text)) and text.split(".")[0] in SECTIONS
    ]
    wrong = []
    for key in keys:
        *parents, leaf = key.split(".")
        if not any(leaf in table.model_fields for table in _tables_at(RlRecipe, parents)):
            wrong.append(key)
    assert (len(keys) > 10, wrong) == (True, [])


@pytest.mark.parametrize("page", PAGES)
def test_pages_metrics_and_commands_are_there(page: str) -> None:
    names = quoted(page)
    pages = [name for name in names if name.startswith("docs/")]
    assert [name for name in pages if not (DOCS.parent / name).exists()] == []
    metrics = (DOCS / "metrics.md").read_text()
    told = [name for name in names if re.fullmatch(r"(policy|rollout|reward|perf|train)/\w+", name)]
    assert [name for name in told if f"`{name}`" not in metrics] == []
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = [name.split()[1] for name in names if name.startswith("verst ") and len(name.split()) > 1]
    assert [name for name in named if name not in commands and not name.startswith("-")] == []
