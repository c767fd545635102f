"""The program of docs/python.md, and the notebook, run as they stand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docs_fixtures import ROOT, blocks

import verst


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a program, which is searched for modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "quickstart_rewards", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    return tmp_path


def run_cells(cells: list[str]) -> dict[str, Any]:
    """Each after the other, in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), names)
    return names


ASKED = """
import json
from pathlib import Path
print(json.dumps([result.complete, result.iterations, str(result.folder), result.heldout_before, iterations, metrics["policy/ratio_max_deviation"]]))
print(json.dumps([plan.steps["visual"].high, exported.what, found.iterations, explained.first, [step.ratio for step in explained.steps], page.name]))
"""


@pytest.mark.ray
def test_the_page_is_a_program(tmp_path: Path) -> None:
    # In a process of its own: Ray forks, and a process that has run a thousand tests has threads.
    program = []
    for _, cell in blocks((ROOT / "docs" / "python.md").read_text(), "python"):
        first = cell.partition("\n")[0]
        if first.startswith("# ") and first.endswith(".py"):
            (tmp_path / first[2:]).write_text(cell)
        else:
            program.append(cell)
    (tmp_path / "program.py").write_text("\n".join([*program, ASKED]))
    done = subprocess.run(
        [sys.executable, "program.py"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    of_run, of_others = done.stdout.strip().splitlines()[-2:]
    complete, number, folder, before, iterations, deviation = json.loads(of_run)
    assert (complete, number, folder) == (True, 2, "runs/red")
    assert 0 < before < 1
    assert iterations == [1, 2]
    assert deviation == 0
    assert json.loads(of_others) == [3, "pipeline", 1, None, [1.0, 1.0], "red.html"]
    assert (tmp_path / "my_model" / "model_index.json").exists()
    assert "metrics" in (tmp_path / "red.html").read_text()
    assert (tmp_path / "cat.png").exists()
    assert done.stdout.count("look at") == done.stdout.count("saved") == 2
    assert 'path = "my_rewards:redness"' in (tmp_path / folder / "recipe.toml").read_text()


def test_the_page_names_what_there_is() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    named = set(verst._MODULE_OF) - {"Event"}
    assert (len(named) > 30, {name for name in named if f"verst.{name}" not in page}) == (True, set())


def test_the_notebook_runs_and_its_reward_rises(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text())
    assert notebook["nbformat"] == 4
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code] == [[]] * len(code)  # nobody's machine is in it
    names = run_cells(["".join(cell["source"]) for cell in code])
    rewards = names["rewards"]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.03
    before, after = (names["pictures"][when] for when in ("before", "after"))
    assert sum(float(s.media[..., 0].float().mean()) for s in after) > sum(
        float(s.media[..., 0].float().mean()) for s in before
    )
    names["plt"].close("all")
