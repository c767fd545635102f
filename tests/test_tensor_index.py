"""The index of a checkpoint's tensors is data: what torch writes is read, and nothing that a file says is ever run."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import loaded, small_tensors
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from verst.errors import CheckpointError
from verst.trainer import checkpoint
from verst.trainer.tensor_index import FILE, read_index


def written(root: Path) -> Path:
    """A checkpoint that is not published yet; its folder of tensors."""
    checkpoint.write_tensors(checkpoint.partial_folder(root, 1), small_tensors(), alone=True)
    return checkpoint.partial_folder(root, 1) / "tensors"


def published(root: Path, index: Any) -> Path:
    """A checkpoint with this in the place of its index, and a manifest that fits."""
    (written(root) / FILE).write_bytes(index if isinstance(index, bytes) else pickle.dumps(index))
    return checkpoint.publish(root, 1, {"iteration": 1}, keep=1)


def as_torch_reads(folder: Path) -> Metadata:
    return FileSystemReader(folder).read_metadata()


def test_what_torch_writes_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    folder = written(tmp_path)
    expected, got = as_torch_reads(folder), read_index(folder)
    assert got.state_dict_metadata == expected.state_dict_metadata
    assert got.storage_data == expected.storage_data
    assert len(got.storage_data) == 3
    tensors = checkpoint.all_tensors(checkpoint.publish(tmp_path, 1, {"iteration": 1}, keep=1))
    assert tensors.keys() == small_tensors().keys()
    assert all(torch.equal(tensors[name], value) for name, value in small_tensors().items())


class Runs:
    """What it is made of is called when it is read."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("where", ["all of it", "a part"])
@pytest.mark.parametrize(
    ("function", "named"), [(os.mkdir, "posix.mkdir"), (open, "io.open"), (eval, "builtins.eval"), (getattr, "getattr")]
)
def test_a_file_that_would_do_something_does_nothing(tmp_path: Path, where: str, function: Any, named: str) -> None:
    mark = tmp_path / "mark"
    code = f"__import__('os').mkdir({str(mark)!r})"
    args = {eval: (code,), getattr: (Path, "mkdir"), open: (str(mark), "w")}.get(function, (str(mark),))
    index: Any = Runs(function, *args)
    if where == "a part":
        whole = as_torch_reads(written(tmp_path))
        whole.planner_data = {"more": index}
        index = whole
    folder = published(tmp_path / "run", index)
    with pytest.raises(CheckpointError, match=rf"step_00000001/tensors/{FILE} is no index.*{named}.* no tensors need"):
        loaded(folder)
    with pytest.raises(CheckpointError, match="no tensors need"):
        checkpoint.all_tensors(folder)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Runs(os.mkdir, str(mark))))
    assert mark.exists()  # which is what such a file does to whoever trusts it


def test_an_index_of_what_is_no_tensor_or_of_another_folder_is_refused(tmp_path: Path) -> None:
    index = as_torch_reads(written(tmp_path))
    index.state_dict_metadata["model.a"] = BytesStorageMetadata()  # torch would read it with a pickle of its own
    with pytest.raises(CheckpointError, match="BytesStorageMetadata, which no tensors need"):
        loaded(published(tmp_path / "bytes", index))
    index = as_torch_reads(written(tmp_path))
    for place in index.storage_data.values():
        place.relative_path = "../../elsewhere.distcp"
    with pytest.raises(CheckpointError, match=r"'\.\./\.\./elsewhere\.distcp' is no file of the folder"):
        loaded(published(tmp_path / "outside", index))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_index(tmp_path / "nowhere")


def test_a_damaged_index_is_said_to_be_one(tmp_path: Path) -> None:
    folder = written(tmp_path)
    whole = (folder / FILE).read_bytes()
    rng = random.Random(5)
    damaged = [whole[:length] for length in range(0, len(whole), 37)] + [b"hello", pickle.dumps({"a": [1, 2]})]
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 5))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        damaged.append(bytes(content))
    said = []
    for content in damaged:
        (folder / FILE).write_bytes(content)
        try:
            read_index(folder)
        except CheckpointError as error:
            said.append(str(error))
    assert all(line.startswith(f"{folder / FILE} is no index of tensors: ") for line in said)
    assert len(said) > len(damaged) / 3
