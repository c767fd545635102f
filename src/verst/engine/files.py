"""Files that requests name: only those in folders that the engine was told of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verst.errors import RequestError


def check_files(paths: Sequence[str | Path], folders: Sequence[Path] | None, *, field: str) -> None:
    """Raises RequestError, naming `field`, for a path outside of `folders`, links followed. None: all may be read."""
    if folders is None:
        return
    roots = [folder.resolve() for folder in folders]
    for path in paths:
        try:
            real = Path(path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise RequestError(f"{field}: {str(path)!r} is no path: {error}") from None
        if not any(real.is_relative_to(root) for root in roots):
            known = ", ".join(str(root) for root in roots) or "none"
            raise RequestError(
                f"{field}: {path} lies in no folder that this engine reads for requests ({known}); "
                "`verst serve --files FOLDER` names one"
            )
