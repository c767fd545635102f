"""What the engine's tests share: one tiny checkpoint, requests, and workers that a test can hold back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from verst.engine.resolve import Resolved, resolve
from verst.engine.server import EngineServer
from verst.engine.wire import GenerateRequest, encode_response, to_microgroup
from verst.engine.worker import Worker
from verst.errors import EngineError
from verst.families.tiny import build_tiny
from verst.types import Microgroup, SampleKey

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("sd3", tmp_path_factory.mktemp("engine") / "sd3")


def request(**changes: Any) -> GenerateRequest:
    """A small rollout request that asks for everything a trainer needs."""
    values: dict[str, Any] = {
        "prompt": "1234",
        "seeds": (11, 12),
        "height": 32,
        "width": 64,
        "num_inference_steps": 4,
        "guidance_scale": 1.0,
        "max_sequence_length": 16,
        "rollout_return_dit_trajectory": True,
        "rollout_return_denoising_env": True,
        "share_denoising_env": True,
        "media_format": "uint8",
    }
    return GenerateRequest(**{**values, **changes})


def raw(**changes: Any) -> dict[str, Any]:
    """The same as a JSON body, which may be wrong."""
    return {**request().model_dump(mode="json", exclude_none=True), **changes}


def keys(count: int) -> list[SampleKey]:
    return [SampleKey(rollout=0, group=0, index=i) for i in range(count)]


def made(worker: Worker, *requests: GenerateRequest) -> list[Microgroup]:
    """What each request gets when they share one batch, through the codec."""
    results = worker.generate([resolve(r, worker.components) for r in requests])
    microgroups = []
    for one, result in zip(requests, results, strict=True):
        if isinstance(result, EngineError):
            raise result
        microgroups.append(to_microgroup(encode_response(result), keys(one.merged().num_samples)))
    return microgroups


class HeldWorker(Worker):
    """A real worker that waits for `go` before each batch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go = threading.Event()
        self.begun = threading.Event()
        self.batches: list[list[tuple[int, ...]]] = []
        """Seeds by request of each batch that was begun."""

    def generate(self, jobs: Sequence[Resolved], **options: Any) -> list[list[dict[str, Any]] | EngineError]:
        self.batches.append([job.seeds for job in jobs])
        self.begun.set()
        assert self.go.wait(20)
        return super().generate(jobs, **options)


class HeldServer(EngineServer):
    """A server around a held worker."""

    worker: HeldWorker

    def _load(self) -> Worker:
        self.worker = HeldWorker(self._folder)
        return self.worker
