"""Words that make no command line: one paragraph, as every other error is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer

from verst.config.checks import did_you_mean

UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a word that is unknown, missing or has a wrong value. It exports only this one kind of it."""


def usage_paragraph(error: Any, words: Sequence[str]) -> str:
    """What is wrong, the nearest that is right, and where all is listed. error: a UsageError. words: of the command line.

    Empty where no words were given at all: the help that then stands there says enough.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    command = error.ctx.command_path if error.ctx is not None else "verst"
    return f"verst: UsageError: {_what(error, words, command)}; `{command} --help` tells what there is\n"


def _what(error: Any, words: Sequence[str], command: str) -> str:
    text = error.format_message().rstrip(".")
    kind = type(error).__name__
    unknown = re.fullmatch(r"No such command '(.*?)'.*", text)
    if kind == "NoSuchOption" and error.ctx is not None:
        options = [name for option in error.ctx.command.params for name in (*option.opts, *option.secondary_opts)]
        known = [name for name in options if name.startswith("--")] + ["--help"]
        return f"{command} has no option {error.option_name!r}{did_you_mean(error.option_name, known)}"
    if unknown is not None:
        return f"{command} has no command {unknown[1]!r}{did_you_mean(unknown[1], list(error.ctx.command.commands))}"
    if kind == "BadParameter" and error.param is not None:
        said = error.message.removeprefix("Value error, ").rstrip(".")
        return f"{_named(error.param, words)}: {said[:1].lower()}{said[1:]}"
    return f"{text[:1].lower()}{text[1:]}"


def _named(parameter: Any, words: Sequence[str]) -> str:
    """An option with its value as it was said; an argument by its name."""
    options = [name for name in parameter.opts if name.startswith("-")]
    if not options:
        return str(parameter.name)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, sign, value = word.partition("=")
        if name in options:
            return f"{name} {value if sign else following!s}"
    return str(options[0])
