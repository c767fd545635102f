"""The columns of a prompt row: which of them mean something to the run, and what their values may be."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verst.errors import PromptError


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What a row says instead of the recipe; None: what the recipe says."""

    height: int | None = None
    """Pixels."""
    width: int | None = None
    """Pixels."""
    num_frames: int | None = None
    fps: float | None = None
    """Frames a second."""
    num_steps: int | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    """Stands for run.seed in the noise of this row's samples, for eval.seed where the row is held out."""
    reward: tuple[str, ...] | None = None
    """Names of the rewards that apply to this row; None: all."""

    def sampling(self) -> dict[str, Any]:
        """Keys of the recipe's table `sampling` -> value, of those that the row sets."""
        values = {name: getattr(self, name) for name in _SAMPLING}
        return {name: value for name, value in values.items() if value is not None}


_SAMPLING = ("height", "width", "num_frames", "fps", "num_steps", "negative_prompt")


@dataclass(frozen=True, kw_only=True)
class RowParts:
    """One row, taken apart."""

    text: str
    images: tuple[str, ...]
    audio: str | None
    overrides: Overrides
    metadata: Mapping[str, Any]


def split_row(row: Mapping[str, Any], where: str, *, folder: Path) -> RowParts:
    """The parts of a row; relative paths of media are relative to `folder`.

    Raises PromptError, beginning with `where`, for a value of the wrong type, a column whose name is nearly one of
    ours, one that a row cannot set, and a file that is not there.
    """
    text = row["prompt"]
    if not isinstance(text, str) or not text.strip():
        raise PromptError(f"{where}: `prompt` must be a text, got {text!r}")
    if not _is_unicode(text):
        raise PromptError(f"{where}: `prompt` holds half of a surrogate pair, which is no character: {text!r}")
    for name in row:
        _refuse_unclear(name, where)
    values = {name: _value(name, row[name], where) for name in _COLUMNS if name in row}
    audio = values.pop("audio", None)
    images = values.pop("image", ())
    return RowParts(
        text=text.strip(),
        images=tuple(_file("image", name, folder, where) for name in images),
        audio=None if audio is None else _file("audio", audio, folder, where),
        overrides=Overrides(**values),
        metadata={name: value for name, value in row.items() if name != "prompt" and name not in _COLUMNS},
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def from_text(name: str, cell: str) -> Any:
    """A cell of a .csv file in the type of its column; text where it is none, which `split_row` then refuses."""
    if name in _LISTS:
        return [part.strip() for part in cell.split(";")]
    for number in (int, float) if name in _NUMBERS else ():
        try:
            return number(cell)
        except ValueError:
            continue
    return cell


def _whole(low: int, high: int) -> Callable[[Any], int | None]:
    def parse(value: Any) -> int | None:
        # A column of whole numbers with a hole is one of floats to pandas.
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return int(value) if whole and not isinstance(value, bool) and low <= value <= high else None

    return parse


def _positive(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and _is_unicode(value) else None


def _path(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _names(value: Any) -> tuple[str, ...] | None:
    items = [value] if isinstance(value, str) else value
    good = isinstance(items, list) and items and all(isinstance(item, str) and item.strip() for item in items)
    return tuple(items) if good else None


_COUNT = (_whole(1, 2**31 - 1), "a whole number of at least 1")
_COLUMNS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "image": (_names, "a path or a list of paths"),
    "audio": (_path, "a path"),
    "height": _COUNT,
    "width": _COUNT,
    "num_frames": _COUNT,
    "fps": (_positive, "a number above 0"),
    "num_steps": _COUNT,
    "negative_prompt": (_text, "a text"),
    "seed": (_whole(0, 2**63 - 1), "a whole number from 0 to 2^63 - 1"),
    "reward": (_names, "the name of a reward or a list of them"),
}
"""Column -> (its value or None where it is no good, what would be)."""
_LISTS = ("image", "reward")
_NUMBERS = ("height", "width", "num_frames", "fps", "num_steps", "seed")
_SYNONYMS = {"num_inference_steps": "num_steps", "image_path": "image", "frames": "num_frames"}
"""What other programs call our columns."""
_FIXED = {
    "guidance_scale": "sampling.guidance_scale is one for the run, since the trainer computes with it as well",
    "sigma_shift": "sampling.sigma_shift is one for the run",
    "num_samples": "rollout.group_size is one for the run",
}
"""What a row cannot set, and why."""


def _value(name: str, value: Any, where: str) -> Any:
    parse, right = _COLUMNS[name]
    parsed = parse(value)
    if parsed is None:
        raise PromptError(f"{where}: `{name}` must be {right}, got {value!r}")
    return parsed


def _refuse_unclear(name: str, where: str) -> None:
    """Free columns are anything, but a slip in one of ours would leave it without effect."""
    if name in _COLUMNS or name == "prompt":
        return
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    if plain in _FIXED:
        raise PromptError(f"{where}: a row cannot set `{name}`: {_FIXED[plain]}; leave the column out")
    meant = plain if plain in _COLUMNS else _SYNONYMS.get(plain)
    if meant is None:
        near = [column for column in _COLUMNS if column[0] == plain[:1]]
        meant = next(iter(difflib.get_close_matches(plain, near, n=1, cutoff=0.8)), None)
    if meant is not None:
        raise PromptError(
            f"{where}: no column `{name}`; did you mean `{meant}`? Rename it if it is something else for a reward"
        )


def _file(column: str, name: str, folder: Path, where: str) -> str:
    path = folder / name
    if not path.is_file():
        raise PromptError(f"{where}: `{column}` names {name}, but there is no file {path}")
    return str(path)
