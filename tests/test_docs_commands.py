"""What the pages say to type can be typed, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main
from docs_fixtures import PAGES, ROOT, block_commands, inline_commands, parse
from typer._click.exceptions import UsageError

from verst.cli.main import app
from verst.config import load_recipe

_OVERRIDE = re.compile(r"[a-z_]+(\.\w+)*=.*")


def missing_argument(error: BaseException) -> bool:
    return type(error).__name__ == "MissingParameter"


def usage_error(words: list[str], *, whole: bool) -> str:
    """What the parser has against a command; a sentence may leave arguments out."""
    try:
        parse(words)
    except UsageError as error:
        return "" if missing_argument(error) and not whole else f"{' '.join(words)}: {error.format_message()}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_parse(page: Path) -> None:
    text = page.read_text()
    wrong = [usage_error(words, whole=True) for words in block_commands(text)]
    wrong += [usage_error(words, whole=False) for words in inline_commands(text)]
    assert [line for line in wrong if line] == []


def test_commands_are_found_and_wrong_ones_told() -> None:
    found = [
        words for page in PAGES for words in (*block_commands(page.read_text()), *inline_commands(page.read_text()))
    ]
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert (len(found) > 70, commands - {words[1] for words in found}) == (True, set())
    text = (
        "```\nverst train a.toml --nope  # no such option\n```\n\n`verst evil` `verst plan --steps`\n\n    verst plan\n"
    )
    told = [usage_error(words, whole=True) for words in block_commands(text)]
    told += [usage_error(words, whole=False) for words in inline_commands(text)]
    assert [bool(line) for line in told] == [True, True, True, False]


def test_recipes_of_commands_load_with_their_changes() -> None:
    loaded = 0
    for page in PAGES:
        for words in block_commands(page.read_text()):
            recipe = next((word for word in words if word.startswith("recipes/")), None)
            if recipe is not None:
                load_recipe(ROOT / recipe, [word for word in words if _OVERRIDE.fullmatch(word)])
                loaded += 1
    assert loaded >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_files_are_there(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:|#", link)]
    wrong = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    named = re.findall(r"`((?:docs|recipes|benchmarks|scripts|tests|examples)/[\w/.-]*)`", text)
    wrong += [name for name in named if not (ROOT / name).exists()]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong += [f"make {name}" for name in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE) if name not in targets]
    assert wrong == []
