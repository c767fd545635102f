"""The two kinds of ranks of one engine: the first, which is a whole worker, and those that follow it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verst.engine.guided import Guidance, guided_velocity
from verst.engine.ranks import Call, EngineRanks, pack_rows, unpack_rows
from verst.engine.resolve import Resolved
from verst.engine.sleep import Keep, Sleep
from verst.engine.worker import Worker
from verst.errors import EngineError, SyncError
from verst.families import recognise
from verst.flow.determinism import make_deterministic
from verst.types import Conditioning, Geometry, Latents
from verst.weights.manifest import Certificate, Manifest
from verst.weights.receive import WeightReceiver

_log = logging.getLogger(__name__)


class LeadWorker(Worker):
    """Rank 0. It alone has text encoders and autoencoder, draws noise, steps and decodes.

    A call that breaks off in the middle leaves the ranks at different places: the engine ends then.
    """

    def __init__(self, folder: Path, *, ranks: EngineRanks, **options: Any) -> None:
        """options: of Worker. Raises ConfigError for a family whose tokens cannot be cut so."""
        super().__init__(folder, **options)
        ranks.split(self.components)
        self._ranks = ranks
        self._broken: str | None = None

    def update_from_manifest(self, manifest: Manifest) -> Certificate:
        """All ranks take the weights. Raises like Worker's, naming the rank."""
        self._refuse_asleep()
        with self._together():
            self._ranks.call("receive", manifest=manifest)
            certificate = self._ranks.receive(self.receiver, manifest)
        self.weight_version = certificate["version"]
        return certificate

    def sleep(self, keep: Keep = "all") -> None:
        if not self.asleep:
            # Refused here or nowhere: all ranks hold the same.
            super().sleep(keep)
            with self._together():
                self._ranks.call("sleep", keep=keep)

    def wake(self) -> None:
        if self.asleep:
            super().wake()
            with self._together():
                self._ranks.call("wake")

    def probe(self) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken)
        super().probe()

    def close(self) -> None:
        super().close()
        # Ranks that are stuck in the middle of a call hear nothing; whoever started them ends them.
        if self._broken is None:
            with self._together():
                self._ranks.call("stop")
            self._ranks.leave()

    def _encode(self, jobs: Sequence[Resolved]) -> Conditioning:
        conditioning = super()._encode(jobs)
        rows = pack_rows("positive", conditioning.positive) | pack_rows("negative", conditioning.negative)
        with self._together():
            self._ranks.call(
                "condition",
                rows,
                geometry=None if conditioning.geometry is None else asdict(conditioning.geometry),
                has_negative=conditioning.negative is not None,
            )
        return conditioning

    def _velocity(
        self,
        x: Latents,
        sigmas: dict[str, Tensor],
        conditioning: Conditioning,
        guidance: Guidance,
        *,
        rows: Tensor | None = None,
    ) -> Latents:
        tensors = pack_rows("latents", x) | pack_rows("sigmas", sigmas)
        with self._together():
            self._ranks.call(
                "forward", tensors, guidance=asdict(guidance), rows=None if rows is None else rows.tolist()
            )
            return super()._velocity(x, sigmas, conditioning, guidance, rows=rows)

    def _update(self, updates: Sequence[Any], *, complete: bool, version: int | None) -> int:
        raise SyncError(
            f"an engine of {self._ranks.size} ranks takes weights that all of them can read: send a manifest to "
            "/update_weights_from_manifest. Nothing was changed."
        )

    @contextmanager
    def _together(self) -> Iterator[None]:
        if self._broken is not None:
            raise EngineError(self._broken)
        try:
            yield
        except SyncError:
            # All ranks have heard of it.
            raise
        except Exception as error:
            self._broken = (
                f"the {self._ranks.size} ranks of this engine lost each other: {type(error).__name__}: {error}"
            )
            raise EngineError(self._broken) from error


class Follower:
    """Any other rank: the transformer alone, and what rank 0 says."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: EngineRanks,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        fp32_modules: Sequence[str] = (),
        deterministic: bool = True,
    ) -> None:
        """As of EngineServer. Raises ModelError, and ConfigError like LeadWorker."""
        self._device = torch.device(device)
        if deterministic:
            make_deterministic(self._device)
        family = recognise(folder, fp32_modules=fp32_modules)
        self._components = family.load(folder, parts=("transformer",), dtype=dtype, device=self._device)
        ranks.split(self._components)
        self._ranks = ranks
        self._receiver = WeightReceiver(self._components.transformer, device=self._device)
        self._sleep = Sleep(self._components, self._receiver, base_is_borrowed=False)
        self._conditioning: Conditioning | None = None

    def follow(self) -> None:
        """Make rank 0's calls until it stops. Raises what broke off, and leaves: the other ranks then fail as well."""
        calls: Mapping[str, Callable[[Call], None]] = {
            "condition": self._condition,
            "forward": self._forward,
            "receive": self._receive,
            "sleep": self._fall_asleep,
            "wake": self._wake_up,
        }
        try:
            while (call := self._ranks.next_call()).name != "stop":
                calls[call.name](call)
        finally:
            self._receiver.close()
            self._ranks.leave()

    def _condition(self, call: Call) -> None:
        self._conditioning = Conditioning(
            positive=unpack_rows("positive", call.tensors),
            negative=unpack_rows("negative", call.tensors) if call.values["has_negative"] else None,
            geometry=None if call.values["geometry"] is None else Geometry(**call.values["geometry"]),
        )

    @torch.no_grad()
    def _forward(self, call: Call) -> None:
        assert self._conditioning is not None, "rank 0 says what to condition on first"
        conditioning, rows = self._conditioning, call.values["rows"]
        if rows is not None:
            conditioning = conditioning.rows(torch.tensor(rows, device=self._device))
        latents, sigmas = (unpack_rows(kind, call.tensors) for kind in ("latents", "sigmas"))
        guidance = Guidance(**call.values["guidance"])
        guided_velocity(self._components, latents, sigmas, conditioning, guidance)

    def _receive(self, call: Call) -> None:
        try:
            self._ranks.receive(self._receiver, call.values["manifest"])
        except SyncError as error:
            # Rank 0 has heard of it, and answers.
            _log.warning("%s", error)

    def _fall_asleep(self, call: Call) -> None:
        self._conditioning = None
        self._sleep.begin(call.values["keep"])

    def _wake_up(self, call: Call) -> None:
        self._sleep.end()
