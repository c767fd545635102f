"""A folder that trainer and engines share: safetensors files, a version published by one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from verst.errors import SyncError
from verst.weights.digest import DigestKind, digest_of
from verst.weights.manifest import Bucket, Manifest, bucket_size
from verst.weights.send import Outgoing, gather
from verst.weights.transports.base import Incoming

_KEPT = 2
"""Versions left in the folder: an engine that starts late may still be reading the one before."""


class DiskSender:
    """Writes `<folder>/weights_<version>/bucket_<i>.safetensors` and `manifest.json`. Rank 0 writes, all gather."""

    def __init__(self, folder: Path, *, rank: int, bucket_bytes: int, digest: DigestKind = "multilinear") -> None:
        self._folder, self._rank, self._bucket_bytes, self._digest = folder, rank, bucket_bytes, digest
        self._written: list[Path] = []
        if rank == 0:
            _remove_all(folder.glob(".partial_weights_*"))
            _remove_all(folder.glob("weights_*"))

    def publish(self, outgoing: Outgoing, *, receivers: int = 1) -> Manifest | None:
        del receivers
        final = self._folder / f"weights_{outgoing.version:08d}"
        partial = final.with_name(f".partial_{final.name}")
        if self._rank == 0:
            _remove_all([partial])
            partial.mkdir(parents=True)
        buckets: list[Bucket] = []
        sent: dict[str, Tensor] = {}
        for index, entries in enumerate(outgoing.layout(self._bucket_bytes)):
            dtypes = [outgoing.dtypes[entry["name"]] for entry in entries]
            whole = gather([outgoing.tensors[entry["name"]] for entry in entries], dtypes)
            if self._rank:
                continue
            cast = [tensor.to(device="cpu", dtype=dtype) for tensor, dtype in zip(whole, dtypes, strict=True)]
            outgoing.check_finite(cast, entries)
            named = {entry["name"]: tensor.contiguous() for entry, tensor in zip(entries, cast, strict=True)}
            name = f"bucket_{index:04d}.safetensors"
            save_file(named, partial / name)
            _flush(partial / name)
            sent |= named
            buckets.append(Bucket(handle=str(final / name), nbytes=bucket_size(entries), tensors=entries))
        if self._rank:
            return None
        manifest = Manifest(
            version=outgoing.version,
            finetune=outgoing.finetune,
            transport="disk",
            endpoint={},
            buckets=buckets,
            digest=digest_of(sent, self._digest),
        )
        (partial / "manifest.json").write_text(json.dumps(manifest))
        _remove_all([final])
        partial.rename(final)
        _flush(self._folder)
        self._written = [*(path for path in self._written if path != final), final]
        _remove_all(self._written[:-_KEPT])
        self._written = self._written[-_KEPT:]
        return manifest

    def send(self) -> str | None:
        return None

    def release(self) -> None:
        pass

    def close(self) -> None:
        _remove_all(self._written)
        self._written = []


class _Files:
    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._manifest, self._device = manifest, device

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        for bucket in self._manifest["buckets"]:
            try:
                with safetensors.safe_open(bucket["handle"], framework="pt", device=str(self._device)) as file:
                    yield {entry["name"]: file.get_tensor(entry["name"]) for entry in bucket["tensors"]}
            except (OSError, safetensors.SafetensorError) as error:
                raise SyncError(f"{bucket['handle']} cannot be read to its end: {error}") from error

    def digest(self) -> str:
        return self._manifest["digest"]


class DiskReceiver:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def open(self, manifest: Manifest) -> Iterator[Incoming]:
        for bucket in manifest["buckets"]:
            self._check(bucket)
        yield _Files(manifest, self._device)

    def _check(self, bucket: Bucket) -> None:
        path = bucket["handle"]
        try:
            with safetensors.safe_open(path, framework="pt", device="cpu") as file:
                shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise SyncError(
                f"{path} cannot be read ({error}): trainer and engine do not share that folder (sync.folder), or the file "
                "is damaged. Nothing was changed."
            ) from error
        announced = {entry["name"]: entry["shape"] for entry in bucket["tensors"]}
        if shapes != announced:
            unlike = sorted(n for n in {*shapes, *announced} if shapes.get(n) != announced.get(n))
            raise SyncError(f"{path} does not hold what was announced: {', '.join(unlike[:3])}. Nothing was changed.")

    def refuse(self, manifest: Manifest, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def _remove_all(folders: Iterable[Path]) -> None:
    for folder in list(folders):
        shutil.rmtree(folder, ignore_errors=True)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
