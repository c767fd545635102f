"""The pages of the documentation, their shell blocks, and the commands in them as the parser sees them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from verst.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "ARCHITECTURE.md")
_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STOPS = {"&", "&&", "|", ">", ";"}


def blocks(text: str, *languages: str) -> Iterator[tuple[str, str]]:
    """What stands behind the language, and the text of each fenced block of these languages."""
    for language, title, inner in _BLOCK.findall(text):
        if language in languages:
            yield title.strip(), inner


def block_commands(text: str) -> Iterator[list[str]]:
    """Words of each `verst` command in a block, fenced or indented."""
    fenced = "\n".join(inner for _, inner in blocks(text, "", "sh", "bash", "console"))
    indented = "\n".join(line[4:] for line in _BLOCK.sub("", text).splitlines() if line.startswith("    "))
    for line in f"{fenced}\n{indented}".replace("\\\n", " ").splitlines():
        if re.match(r"(\w+=\S+ )*verst [a-z]", line):
            words = _words(line)
            yield words[words.index("verst") :]


def inline_commands(text: str) -> Iterator[list[str]]:
    """Words of each `verst` command between backticks in a sentence."""
    for code in re.findall(r"`(verst [a-z][^`]*)`", _BLOCK.sub("", text)):
        yield _words(" ".join(code.split()))


def _words(line: str) -> list[str]:
    """As a shell splits it, up to a pipe; [what may be left out] is taken along, and dots for more are not."""
    words = [word if "=[" in word else word.strip("[]") for word in shlex.split(line, comments=True)]
    end = next((i for i, word in enumerate(words) if word in _STOPS), len(words))
    return [word for word in words[:end] if word != "..."]


def parse(words: list[str]) -> Any:
    """The context of the command at the end of `verst ...`: raises what the command line would say."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("verst", list(words[1:]))
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return context
