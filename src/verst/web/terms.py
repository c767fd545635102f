"""The terms of a request, in headers: which weights may answer it, and how long that may take.

    verst-weight-version: 7          made with exactly these weights
    verst-min-weight-version: 5      with these or newer ones
    verst-timeout-s: 120.5           seconds that are left for the answer

They say nothing about the sample, so they are no fields of the request; a server that does not know them ignores them.
The answer says in `verst-weight-version` what made it, and that of a router which engine did, and how often it was begun
anew because an engine was lost over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from verst.errors import RequestError

WEIGHT_VERSION = "verst-weight-version"
MIN_WEIGHT_VERSION = "verst-min-weight-version"
TIMEOUT = "verst-timeout-s"
ENGINE = "verst-engine"
REISSUED = "verst-reissued"
SHARED = "application/vnd.verst.shared+msgpack"
"""Content type of answers in the shared memory of one host (engine.transport)."""
T = TypeVar("T", int, float)


@dataclass(frozen=True, kw_only=True)
class Terms:
    version: int | None = None
    """Exactly this weight version."""
    min_version: int | None = None
    """This weight version or a newer one."""
    timeout_s: float | None = None
    """Seconds from now."""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Terms:
        """headers: of a request, with names in lower case. Raises RequestError for what is no number."""
        return cls(
            version=_number(headers, WEIGHT_VERSION, int, "a weight version, e.g. 7"),
            min_version=_number(headers, MIN_WEIGHT_VERSION, int, "a weight version, e.g. 7"),
            timeout_s=_number(headers, TIMEOUT, float, "a positive number of seconds"),
        )

    def headers(self) -> dict[str, str]:
        """The same, for a request."""
        named = {WEIGHT_VERSION: self.version, MIN_WEIGHT_VERSION: self.min_version, TIMEOUT: self.timeout_s}
        return {name: str(value) for name, value in named.items() if value is not None}

    @property
    def names_weights(self) -> bool:
        return self.version is not None or self.min_version is not None

    def admits(self, version: int | None) -> bool:
        """Whether these weights may answer. version: None = of an engine that does not say which it holds."""
        if not self.names_weights:
            return True
        if version is None:
            return False
        return self.version in (None, version) and (self.min_version is None or version >= self.min_version)

    def __str__(self) -> str:
        exact = [] if self.version is None else [f"weights of version {self.version}"]
        least = [] if self.min_version is None else [f"weights of version {self.min_version} or newer"]
        return " and ".join(exact + least) or "any weights"


ANY = Terms()


def _number(headers: Mapping[str, str], name: str, kind: Callable[[str], T], what: str) -> T | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not math.isfinite(value) or (kind is float and value <= 0):
        raise RequestError(f"{name}: {text!r} is not {what}")
    return value
