"""What must fit, and the nearest that does: numbers that divide each other, words of a list."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from verst.errors import ConfigError


def divides(small_key: str, small: int, large_key: str, large: int) -> None:
    if large % small:
        nearest = nearest_divisor(small, large)
        raise ConfigError(f"{small_key} = {small} does not divide {large_key} = {large}; nearest that does: {nearest}")


def nearest_divisor(number: int, of: int) -> int:
    fits = [n for n in range(1, of + 1) if of % n == 0]
    return min(fits, key=lambda n: (abs(n - number), n))


def nearest_fit(tile: int, micro: int) -> int:
    fits = [n for n in range(1, 2 * max(tile, micro) + 1) if n % micro == 0 or micro % n == 0]
    return min(fits, key=lambda n: (abs(n - tile), n))


def did_you_mean(value: Any, valid: Sequence[str], otherwise: str = "") -> str:
    """The end of a message: the nearest of `valid`, and all of them, or what is said in place of a long list."""
    close = difflib.get_close_matches(str(value), valid, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f": {hint}{otherwise or 'valid: ' + ', '.join(map(repr, valid))}"
