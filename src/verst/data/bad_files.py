"""Files that cannot be used: named with their reason in `<run folder>/bad_files.jsonl`, counted, or the end of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from verst.errors import DataError

STARTUP = -1
"""`step` of what was found before the first step."""


class BadFiles:
    """The same file is named once, with the step that found it first, so that a resumed run counts the same."""

    def __init__(self, path: Path, policy: Literal["stop", "skip"]) -> None:
        """path: bad_files.jsonl, read where an earlier process left one."""
        self._path = path
        self._policy = policy
        self._found: dict[str, int] = {}
        if path.exists():
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
            self._found = {row["file"]: row["step"] for row in rows}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, name: str, reason: str, *, step: int = STARTUP) -> None:
        """Raises DataError, naming the file, when the policy is to stop."""
        if name not in self._found:
            self._found[name] = step
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"file": name, "reason": reason, "step": step}, ensure_ascii=False) + "\n")
        if self._policy == "stop":
            raise DataError(f'{name}: {reason}. Repair or remove it, or set data.on_bad_file = "skip"')

    def resume_at(self, step: int) -> None:
        """Forget what was found in later steps: they are made again, and find it again."""
        rows = []
        if self._path.exists():
            rows = [json.loads(line) for line in self._path.read_text(encoding="utf-8").split("\n")[:-1]]
        kept = [row for row in rows if row["step"] < step]
        self._found = {row["file"]: row["step"] for row in kept}
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
        partial.replace(self._path)
