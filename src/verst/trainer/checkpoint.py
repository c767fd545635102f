"""Checkpoints: written beside, published by one rename, verified before they are read.

`step_%08d/` holds `manifest.json` (every file with size and SHA-256), `run_state.json` and the tensors in
torch.distributed.checkpoint's format, which resharding reads on any number of ranks.
A folder without that name or manifest was never published and is never loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from verst.errors import CheckpointError

_MANIFEST, _STATE, _TENSORS = "manifest.json", "run_state.json", "tensors"
_BEST = "best.json"


def step_folder(root: Path, iteration: int) -> Path:
    return root / f"step_{iteration:08d}"


def iteration_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def published(root: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(p for p in root.glob("step_*") if (p / _MANIFEST).exists())


def partial_folder(root: Path, iteration: int) -> Path:
    """Where a checkpoint is written before it is published."""
    return root / f".partial_step_{iteration:08d}"


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """All ranks write their shards. Raises CheckpointError, naming them, for tensors that are not finite.

    alone: this is the only rank and there is no process group.
    """
    broken = [name for name, value in tensors.items() if not _local(value).isfinite().all()]
    if broken:
        raise CheckpointError(f"not saved: non-finite values in {', '.join(broken[:5])} ({len(broken)} tensors)")
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(dict(tensors), storage_writer=_Writer(folder / _TENSORS), no_dist=alone)


def publish(root: Path, iteration: int, state: Mapping[str, Any], *, keep: int, best: int | None = None) -> Path:
    """Make the partial checkpoint of `iteration` the newest one; drop all but the newest `keep` and the best.

    best: the iteration of the best checkpoint, this one or an older one; `best_folder` finds it from then on.
    """
    partial, final = partial_folder(root, iteration), step_folder(root, iteration)
    with _explained(partial):
        (partial / _STATE).write_text(json.dumps(state, indent=1))
        files = sorted(p for p in partial.rglob("*") if p.is_file())
        entries = {str(p.relative_to(partial)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
        for path in files:
            _sync(path)
        (partial / _MANIFEST).write_text(json.dumps({"iteration": iteration, "files": entries}, indent=1))
        _sync(partial / _MANIFEST)
        if final.exists():
            _remove(final)
        partial.rename(final)
        _sync(root)
    if best is not None:
        # Before the old best may go: at any instant the file names one that is there.
        _mark_best(root, best)
    for old in published(root)[:-keep]:
        if best is None or old != step_folder(root, best):
            _remove(old)
    return final


def best_folder(root: Path) -> Path | None:
    """The best published checkpoint; None where none is kept. Raises CheckpointError for a damaged marker."""
    if not (root / _BEST).exists():
        return None
    try:
        return step_folder(root, int(json.loads((root / _BEST).read_text())["iteration"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{root / _BEST} cannot be read: {error}") from None


def _mark_best(root: Path, iteration: int) -> None:
    partial = root / f".{_BEST}.partial"
    with _explained(partial):
        partial.write_text(json.dumps({"iteration": iteration}))
        _sync(partial)
        partial.rename(root / _BEST)
        _sync(root)


def _remove(folder: Path) -> None:
    # Renamed first: a kill in the middle of the removal must not leave a published half.
    doomed = folder.with_name(f".removed_{folder.name}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def sweep(root: Path) -> None:
    """Remove what an interrupted save or removal left behind."""
    for leftover in [*root.glob(".partial_step_*"), *root.glob(".removed_step_*")]:
        shutil.rmtree(leftover)


def read_state(folder: Path) -> dict[str, Any]:
    """The run state of a published checkpoint, after every file was checked against the manifest.

    Raises CheckpointError, naming the file, for one that is missing, cut short or changed.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        for name, entry in manifest["files"].items():
            path = folder / name
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise CheckpointError(
                    f"{path} has {size} bytes, {entry['bytes']} were written: it is damaged. {_REMEDY}"
                )
            if _sha256(path) != entry["sha256"]:
                raise CheckpointError(f"{path} is not what was written (checksum differs). {_REMEDY}")
        state: dict[str, Any] = json.loads((folder / _STATE).read_text())
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. {_REMEDY}") from error
    return state


_REMEDY = "Remove that checkpoint folder to go on from the one before it."


def read_tensors(folder: Path, into: Mapping[str, Tensor], *, alone: bool) -> None:
    """Load in place, whatever number of ranks wrote it. Raises CheckpointError when the names or shapes differ."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(dict(into), checkpoint_id=folder / _TENSORS, no_dist=alone)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} does not fit this run: {error}") from error


class _explained:
    """Turns an OSError of a save into a CheckpointError; the partial folder goes away, older checkpoints stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        cause = _os_error(error)
        if cause is None:
            return
        root = self._folder.parent
        free = shutil.disk_usage(root).free if root.exists() else 0
        shutil.rmtree(self._folder, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {self._folder.name.removeprefix('.partial_')} was not saved in {root}: "
            f"{cause.strerror or cause} ({free / 2**20:.0f} MiB free). Earlier checkpoints are untouched; "
            "make room and run the same command again."
        ) from error


class _Writer(FileSystemWriter):
    """Raises what the operating system said: torch.save hides it behind an error of its own, and ranks tell each other
    of failures without their causes."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = _os_error(error)
            if cause is None:
                raise
            raise cause from error


def _os_error(error: BaseException | None) -> OSError | None:
    """The operating system's refusal behind `error`."""
    if isinstance(error, CheckpointException):
        return next((e for e, _ in error.failures.values() if isinstance(e, OSError)), None)
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _local(value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
