"""Prompts by position: which prompt comes when is a function of one number, so that a resumed run needs no more."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verst.errors import PromptError
from verst.flow.noise import derive_seed
from verst.rollout.columns import Overrides, split_row
from verst.rollout.prompt_files import READERS


@dataclass(frozen=True, kw_only=True)
class Prompt:
    text: str
    index: int
    """Place in the file, from 0, blank lines not counted."""
    where: str = ""
    """file:line, for messages."""
    images: tuple[str, ...] = ()
    """Condition images: absolute paths."""
    audio: str | None = None
    """Condition sound: an absolute path."""
    overrides: Overrides = field(default_factory=Overrides)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row, for rewards and filters."""


class PromptSource:
    """An endless sequence of prompts: the file over and over, each epoch in an order of its own.

    Epoch n's order follows from `derive_seed(seed, "epoch", n)` alone.
    """

    def __init__(self, path: Path, *, seed: int, shuffle: bool) -> None:
        """Reads the file. Raises PromptError."""
        self.prompts = read_prompts(path)
        self._seed = seed
        self._shuffle = shuffle
        # Two: consecutive positions may straddle the end of an epoch.
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        """Prompts in the file, i.e. positions of one epoch."""
        return len(self.prompts)

    def at(self, position: int) -> Prompt:
        """The prompt at `position` >= 0; position // len is the epoch."""
        if position < 0:
            raise ValueError(f"prompt position {position} is negative")
        epoch, offset = divmod(position, len(self.prompts))
        return self.prompts[self._order(epoch)[offset]]

    def _make_order(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self._shuffle:
            random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
        return order


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file in its order; duplicates stay, blank lines are skipped. docs/prompts.md has the columns.

    .txt: one a line; .jsonl: objects with a string `prompt`; .csv and .parquet: tables with the column `prompt`.
    Raises PromptError, with file:line, for a file that is missing, empty, of another kind or encoding, a bad line or
    value, and a picture or sound that is not there.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise PromptError(f"{path}: prompt files end in {', '.join(READERS)}")
    prompts = []
    for index, (where, row) in enumerate(reader(path)):
        parts = split_row(row, where, folder=path.absolute().parent)
        prompts.append(
            Prompt(
                text=parts.text,
                index=index,
                where=where,
                images=parts.images,
                audio=parts.audio,
                overrides=parts.overrides,
                metadata=parts.metadata,
            )
        )
    if not prompts:
        raise PromptError(f"{path} holds no prompt")
    return prompts
