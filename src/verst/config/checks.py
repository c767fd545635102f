"""Numbers that must divide each other, and the nearest that do."""

from __future__ import annotations

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
