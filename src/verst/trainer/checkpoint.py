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
from concurrent.futures import Future as Future_
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from verst.errors import CheckpointError
from verst.trainer.tensor_index import IndexedReader, read_index
from verst.weights.adapter_files import write_adapters
from verst.weights.lora import LoraSpec

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
    _refuse_non_finite(tensors, alone=alone)
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(dict(tensors), storage_writer=_Writer(folder / _TENSORS), no_dist=alone)


def _refuse_non_finite(tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    broken = {name for name, value in tensors.items() if not _local(value).isfinite().all()}
    if not alone and dist.get_world_size() > 1:
        # On all ranks or on none: the others would wait in the writer for a rank that has given up.
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, broken)
        broken = set().union(*everywhere)
    if broken:
        names = sorted(broken)
        raise CheckpointError(f"not saved: non-finite values in {', '.join(names[:5])} ({len(names)} tensors)")


def write_adapter_files(folder: Path, module: nn.Module, tensors: Mapping[str, Tensor], spec: LoraSpec) -> None:
    """The LoRA once more, in PEFT's layout, beside the shards. One rank calls it."""
    with _explained(folder):
        write_adapters(folder, module, tensors, spec)


class BackgroundSaver:
    """One rank's asynchronous writer: copies the tensors to the host, then writes from a thread.

    The ranks' writers agree over a group of their own, beside the training's collectives. All ranks make it together.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._running: tuple[Path, Future_[Any]] | None = None

    def begin(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Returns when the tensors may change. Raises CheckpointError for values that are not finite."""
        assert self._running is None, "one save at a time"
        _refuse_non_finite(tensors, alone=False)
        with _explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            running: Any = async_save(
                dict(tensors), storage_writer=_Writer(folder / _TENSORS), process_group=self._group
            )
        self._running = (folder, running)

    def done(self) -> bool:
        """Whether it is written. Raises CheckpointError when it cannot be."""
        if self._running is not None and self._running[1].done():
            self.finish()
        return self._running is None

    def finish(self) -> None:
        """Wait until it is written. Raises CheckpointError when it cannot be."""
        if self._running is not None:
            (folder, running), self._running = self._running, None
            with _explained(folder):
                running.result()

    def close(self) -> None:
        """Without a word on what was not waited for: whoever wanted it has asked."""
        if self._running is not None:
            wait([self._running[1]])
            self._running = None


def publish(
    root: Path,
    iteration: int,
    state: Mapping[str, Any],
    *,
    keep: int,
    best: int | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Make the partial checkpoint of `iteration` the newest one; drop all but the newest `keep` and the best.

    best: the iteration of the best checkpoint, this one or an older one; `best_folder` finds it from then on.
    files: path in the checkpoint -> content, of what else belongs to it.
    """
    partial, final = partial_folder(root, iteration), step_folder(root, iteration)
    with _explained(partial):
        for name, content in (files or {}).items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes(content)
        (partial / _STATE).write_text(json.dumps(state, indent=1))
        written = sorted(p for p in partial.rglob("*") if p.is_file())
        entries = {str(p.relative_to(partial)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in written}
        for path in written:
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
    for name, entry in _written(folder).items():
        path = folder / name
        try:
            size, digest = path.stat().st_size, _sha256(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} cannot be read: {error}. {_REMEDY}") from error
        if size != entry["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes, {entry['bytes']} were written: it is damaged. {_REMEDY}")
        if digest != entry["sha256"]:
            raise CheckpointError(f"{path} is not what was written (checksum differs). {_REMEDY}")
    return _read_record(folder / _STATE)


def _written(folder: Path) -> dict[str, dict[str, Any]]:
    """What the manifest says of each file: its bytes and sha256. Only of files in the folder."""
    files = _read_record(folder / _MANIFEST).get("files")
    entries = files.values() if isinstance(files, dict) else [None]
    if not all(isinstance(entry, dict) and {"bytes", "sha256"} <= set(entry) for entry in entries):
        raise CheckpointError(f"{folder / _MANIFEST} does not say which files were written. {_REMEDY}")
    written: dict[str, dict[str, Any]] = files or {}
    outside = [name for name in written if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise CheckpointError(f"{folder / _MANIFEST} names {outside[0]!r}, which is not in the folder. {_REMEDY}")
    return written


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.parent} cannot be read: {path.name}: {error}. {_REMEDY}") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} holds a {type(record).__name__} and no record. {_REMEDY}")
    return record


_REMEDY = "Remove that checkpoint folder to go on from the one before it."


def read_tensors(folder: Path, into: Mapping[str, Tensor], *, alone: bool) -> None:
    """Load in place, whatever number of ranks wrote it. Raises CheckpointError when the names or shapes differ, and for a
    damaged index."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(dict(into), storage_reader=IndexedReader(folder / _TENSORS), no_dist=alone)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} does not fit this run: {error}") from error


def all_tensors(folder: Path) -> dict[str, Tensor]:
    """Everything that a checkpoint holds, on the CPU. Raises CheckpointError."""
    index = read_index(folder / _TENSORS)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    read_tensors(folder, tensors, alone=True)
    return tensors


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
