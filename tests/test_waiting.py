"""What a command shows while it works: words that go away again, and nothing where nobody looks."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from cli_fixtures import here
from rich.console import Console
from run_fixtures import tiny_model

from verst.cli.options import print_json
from verst.families.tiny import build_tiny
from verst.loops import local_engine
from verst.obs.waiting import waiting


def screen(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_what_goes_on_and_how_far_it_is() -> None:
    console = screen(terminal=True)
    with waiting(console=console) as tell:
        tell("loading [a] model")
        tell("sampling, batches", done=3, total=8)
    # However short: each is drawn when it is told.
    for words in ("loading [a] model", "sampling, batches", "3/8"):
        assert words in text(console)
    # The line is taken away: the cursor goes up and the line is erased.
    assert text(console).endswith("\x1b[2K")


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, True)])
def test_nothing_is_shown_where_nobody_looks(terminal: bool, quiet: bool) -> None:
    console = screen(terminal=terminal)
    with waiting(quiet=quiet, console=console) as tell:
        tell("loading", done=1, total=2)
    assert text(console) == ""


def test_an_error_takes_the_line_away_too() -> None:
    console = screen(terminal=True)
    with pytest.raises(ZeroDivisionError), waiting(console=console) as tell:
        tell("writing", done=1 // 0)
    assert text(console).endswith("\x1b[2K")


def test_a_picture_is_told_step_by_step() -> None:
    worker, _ = local_engine.open_worker(tiny_model(), device="cpu")
    told: list[tuple[str, int, int | None]] = []
    values = {"prompts": ("a",), "seeds": (1,), "rollout": False, "height": 32, "width": 32, "num_inference_steps": 3}
    local_engine.generate(worker, values, tell=lambda words, done=0, total=None: told.append((words, done, total)))
    assert told == [
        ("encoding the prompts", 0, None),
        ("denoising, steps", 0, 3),
        ("denoising, steps", 1, 3),
        ("denoising, steps", 2, 3),
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_command_shows_it_on_stderr_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    asked = ("generate", tiny_model(), "a cat", "--height", "32", "--width", "32", "--steps", "2")
    for options, shown in (((), True), (("--quiet",), False), (("--json",), False)):
        monkeypatch.setattr(sys, "stderr", Terminal())
        assert here(monkeypatch, *asked, *options) == 0
        output = capsys.readouterr().out
        if "--json" in options:
            assert json.loads(output) == [{"path": "generated/000_a_cat.png", "prompt": "a cat", "seed": 0}]
        else:
            assert output == "generated/000_a_cat.png\n"
        assert isinstance(sys.stderr, Terminal)
        said = sys.stderr.getvalue()
        # In this process a bar of another library may stand there, which the command has off.
        assert ("denoising, steps" in said) == ("\x1b[" in said) == shown


def test_json_says_what_numbers_and_paths_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": (1.5, float("inf")), 3: Path("x/y")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None], "3": "x/y"}


def test_plan_as_json_has_what_the_tables_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Path(__file__).parents[1] / "recipes" / "glyphs_grpo.toml"
    build_tiny("sd3", tmp_path / "model")
    monkeypatch.chdir(Path(__file__).parents[1])
    assert here(monkeypatch, "plan", recipe, f"model.path={tmp_path / 'model'}", "--json", "--steps") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recipe"]["run"]["name"] == "glyphs_grpo"
    assert told["batch"]["samples"] == told["batch"]["num_groups"] * told["batch"]["group_size"] == 128
    assert {process["role"] for process in told["processes"]} >= {"engine", "trainer", "parser"}
    assert len(told["steps"]["visual"]["rows"]) == told["recipe"]["sampling"]["num_steps"]
    assert told["memory"] is None
