"""The index of a checkpoint's tensors (`.metadata` of torch.distributed.checkpoint), read as data.

The file is a pickle, and torch's own reader would run what it names. Here it makes records, sizes and dtypes alone, of which
the index is built anew; a file that names anything else is refused before that is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError, _Unpickler  # type: ignore[attr-defined]
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from verst.errors import CheckpointError

FILE = ".metadata"
_OF_TENSORS = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    *((_OF_TENSORS, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_OF_TENSORS, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_IGNORED = {
    (_OF_TENSORS, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}
"""Memory formats, layouts, and where the checkpoint once stood: nothing that a reader needs."""
_DAMAGED = (
    *(UnpicklingError, EOFError, AssertionError, AttributeError, TypeError, ValueError, KeyError, IndexError),
    *(OverflowError, MemoryError, RecursionError),
)
"""What a file that is no such pickle, or not all of one, makes of its reader."""


class IndexedReader(FileSystemReader):
    """Of the tensors in a folder. Raises CheckpointError for an index that is missing, damaged, or holds what it must not."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.index = read_index(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.index.storage_meta = StorageMeta(load_id=self.load_id)
        return self.index


def read_index(folder: Path) -> Metadata:
    """Raises CheckpointError, naming the file."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            return _index(_Reader(file).load())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except _DAMAGED as error:
        raise CheckpointError(f"{path} is no index of tensors: {type(error).__name__}: {error}") from error


class _Record:
    """In the place of an instance of torch's class of that name: what it was made of."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(_Unpickler):  # type: ignore[misc]
    """Python's own reader in Python: the one in C takes memory for whatever number a damaged file says."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        # Of this file alone: a pickle can write to classes that it is given.
        self._classes = {named: type(named[1], (_Record,), {}) for named in _RECORDS | _IGNORED}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if (module, name) == ("torch", "Size"):
            return torch.Size
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise UnpicklingError(f"it names {module}.{name}, which no tensors need")


def _index(top: Any) -> Metadata:
    fields = _fields(top, "Metadata")
    return Metadata(
        state_dict_metadata={_text(name): _tensor(entry) for name, entry in fields["state_dict_metadata"].items()},
        storage_data={_key(key): _place(place) for key, place in fields["storage_data"].items()},
    )


def _tensor(entry: Any) -> TensorStorageMetadata:
    fields = _fields(entry, "TensorStorageMetadata")
    dtype, *_ = _state(fields["properties"], "TensorProperties")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(offsets=_size(c["offsets"]), sizes=_size(c["sizes"])) for c in chunks],
    )


def _key(key: Any) -> MetadataIndex:
    fields = _fields(key, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]), None if offset is None else _size(offset), None if index is None else _count(index)
    )


def _place(place: Any) -> _StorageInfo:
    fields = _fields(place, "_StorageInfo")
    name = _text(fields["relative_path"])
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no file of the folder")
    return _StorageInfo(relative_path=name, offset=_count(fields["offset"]), length=_count(fields["length"]))


def _state(record: Any, name: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise TypeError(f"a {type(record).__name__} stands where a {name} should")
    return record.state


def _fields(record: Any, name: str) -> Mapping[str, Any]:
    state = _state(record, name)
    if not isinstance(state, dict):
        raise TypeError(f"a {name} is made of a {type(state).__name__}")
    return state


def _size(value: Any) -> torch.Size:
    return torch.Size([_count(number) for number in value])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value
