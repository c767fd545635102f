"""A worker whose model computes elsewhere: in an SGLang-Diffusion server, which it feeds and checks."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verst.engine.records import Decoded, sample_records
from verst.engine.resolve import Resolved
from verst.engine.sglang.answers import Answers, Made
from verst.engine.sglang.contract import SglangClient, Way
from verst.engine.sglang.families import Pipeline
from verst.engine.sglang.process import ServerProcess
from verst.engine.sglang.requests import body_of, refuse_what_it_lacks
from verst.engine.sglang.weights import ServerWeights
from verst.engine.sleep import Keep
from verst.engine.worker import OnStage, Worker
from verst.errors import EngineError, ModelError, RequestError, SyncError
from verst.families import ALL_PARTS, Components
from verst.flow.hooks import RolloutResult
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, join_rows
from verst.weights.manifest import Certificate, Manifest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the adapter treats its server."""

    timeout_s: float
    """One sample, or one update, may take."""
    way: Way
    """How whole tensors reach it."""
    check_noise: bool
    """Prove the seed of each sample."""


class SglangWorker(Worker):
    """Holds the transformer's weights on the CPU, as a mirror that the trainer's weights arrive in and are certified by,
    and no other weight. What it says of a sample it has proven from the server's answer.
    """

    def __init__(
        self, folder: Path, server: ServerProcess, pipeline: Pipeline, *, dtype: torch.dtype, options: ServerOptions
    ) -> None:
        """Starts the server. Raises ModelError, EngineError, and SyncError where it holds other weights than `folder`."""
        self._server, self._pipeline, self._options = server, pipeline, options
        super().__init__(folder, dtype=dtype, device="cpu")
        server.start()
        try:
            self._connect()
            count = self._weights.compare()
        except BaseException:
            self.close()
            raise
        _log.info("SGLang %s at %s holds the %d tensors of %s", self.version, server.url, count, folder)

    def _load(self, folder: Path, dtype: torch.dtype) -> Components:
        """The transformer's weights; of all other modules the structure alone, and tokenizers and scheduler."""
        mirror = self.family.load(folder, parts=("transformer",), dtype=dtype, device=self.device)
        others = [part for part in ALL_PARTS if part != "transformer"]
        rest = self.family.load(folder, parts=others, dtype=dtype, device=torch.device("meta"))
        return replace(mirror, modules={**rest.modules, **mirror.modules})

    def _connect(self) -> None:
        self._client = SglangClient(self._server.url, timeout_s=self._options.timeout_s)
        self.version = self._client.verify(self._pipeline)
        self._weights = ServerWeights(
            self._client, self.components.transformer, dtype=self.components.dtype, way=self._options.way
        )
        noise = [torch.device("cpu")]
        if torch.cuda.is_available():
            noise.append(torch.device("cuda"))
        self._answers = Answers(
            self._server.url,
            self._pipeline,
            stream=self.family.streams[0],
            noise=tuple(noise) if self._options.check_noise else (),
        )

    def refuse(self, job: Resolved) -> None:
        refuse_what_it_lacks(job, self._pipeline)

    def generate(
        self,
        jobs: Sequence[Resolved],
        *,
        stopped: Callable[[], bool] = lambda: False,
        on_stage: OnStage = lambda job, stage, start_s, end_s: None,
    ) -> list[list[dict[str, Any]] | EngineError]:
        """See `Worker.generate`. One sample after the other, each a request of its own: the contract has no way to stop
        one, so `stopped` is asked between them."""
        if self.receiver.invalid is not None:
            raise EngineError(f"the server's weights are not whole: {self.receiver.invalid}; send them again")
        results: list[list[dict[str, Any]] | EngineError] = []
        for number, job in enumerate(jobs):
            begun = time.perf_counter()
            # One stream: what a pipeline is mapped to has no other.
            ((stream, scheduler),) = self.family.schedule(
                self.components, job.geometry, num_steps=job.num_steps, shift=job.request.sigma_shift
            ).items()
            made = self._make(job, stream, scheduler, stopped)
            on_stage(number, "denoise", begun, time.perf_counter())
            results.append(self._records(job, made, stream, scheduler.shift, time.perf_counter() - begun))
        return results

    def _make(
        self, job: Resolved, stream: str, scheduler: FlowMatchEulerDiscreteScheduler, stopped: Callable[[], bool]
    ) -> list[Made]:
        shape = self.family.latent_shapes(self.components, job.geometry)[stream]
        made: list[Made] = []
        for row, prompt in enumerate(job.prompts):
            if stopped():
                raise EngineError("the batch was stopped: nobody waits for it any more, or the engine is shutting down")
            # Said once for each prompt: its encoding does not depend on the sample.
            says = job.request.rollout_return_denoising_env and prompt not in job.prompts[:row]
            body = body_of(job, row, conditioning=says)
            try:
                record = self._client.generate(body)
            except EngineError as error:
                raise EngineError(f"{error}{'' if self._client.healthy() else self._server.last_words()}") from error
            made.append(self._answers.read(job, row, record, scheduler, shape))
        return made

    def _records(
        self, job: Resolved, made: Sequence[Made], stream: str, shift: float, seconds: float
    ) -> list[dict[str, Any]] | EngineError:
        broken = [
            name
            for name, tensors in (
                ("latents", [one.trajectory.latents for one in made]),
                ("log-probs", [one.trajectory.log_probs for one in made]),
                ("decoded pixels", [one.pixels for one in made]),
            )
            if not all(t.isfinite().all() for t in tensors)
        ]
        if broken:
            return EngineError(
                f"{', '.join(broken)} of the samples with seeds {list(job.seeds)} are not finite (weights of version "
                f"{self.weight_version}, SGLang {self.version})"
            )
        self.num_samples += len(job.seeds)
        request = job.request
        rollout = RolloutResult()
        if request.rollout:
            conditioning = _conditioning(job, made) if request.rollout_return_denoising_env else None
            rollout = RolloutResult(
                trajectories={stream: [one.trajectory for one in made]}, debug={stream: {}}, conditioning=conditioning
            )
        pixels = torch.stack([one.pixels for one in made])
        drawn_on = self._answers.device
        facts = {
            "sigmas": made[0].trajectory.sigmas.tolist(),
            "extra_stream_sigmas": {},
            "sigma_shift": shift,
            "model_dtype": str(self.components.dtype).removeprefix("torch."),
            "device": "unknown" if drawn_on is None else drawn_on.type,
            "batch_rows": 1,
            "weight_version": self.weight_version,
            "engine": f"sglang {self.version}",
        }
        if drawn_on is not None:
            facts["generator_device"] = drawn_on.type
        return sample_records(
            job,
            streams=(stream,),
            rollout=rollout,
            decoded=Decoded(pixels=pixels) if request.return_media else None,
            facts=facts,
            seconds=seconds,
            request_id=str(uuid.uuid4()),
            peak_memory_mb=None,
        )

    def probe(self) -> None:
        if not self._client.healthy():
            raise RuntimeError(f"SGLang's server at {self._server.url} is gone.{self._server.last_words()}")

    def update_from_manifest(self, manifest: Manifest) -> Certificate:
        """The mirror takes the weights, and the server the mirror's, proven tensor by tensor.

        A push that fails leaves the server with anything, since it has no way back: one of ours is started anew and gets
        all of it once more. Raises SyncError like `Worker.update_from_manifest`.
        """
        certificate = self.receiver.apply(manifest)
        version = certificate["version"]
        self.receiver.invalid = f"version {version} has not reached the server"
        try:
            self._weights.push(manifest)
        except (SyncError, EngineError) as error:
            if not self._server.launched:
                raise SyncError(f"{error}; {self._server.url} may hold weights of two versions: restart it") from error
            _log.warning("the server is started anew, for an update failed: %s", error)
            self._push_anew(manifest)
        self.receiver.invalid = None
        self.weight_version = version
        return certificate

    def _push_anew(self, manifest: Manifest) -> None:
        self._client.close()
        kept = self._weights
        try:
            self._server.start()
            self._connect()
            self._weights.know(kept)
            self._weights.push(manifest)
        except (EngineError, ModelError) as error:
            raise SyncError(f"SGLang's server took no weights, nor did one in its place: {error}") from error

    def _update(
        self, updates: Sequence[tuple[str, Mapping[str, Tensor]]], *, complete: bool, version: int | None
    ) -> int:
        raise SyncError(
            "an SGLang engine takes weights that it can prove: send a manifest to /update_weights_from_manifest. Nothing "
            "was changed."
        )

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """The server's own. Raises EngineError."""
        return self._client.checksums(names)

    def tensor_hashes(self, module: str) -> dict[str, str]:
        """Of the mirror, which the server was proven to be. Raises RequestError for what has none."""
        if not module.startswith("transformer"):
            raise RequestError(f"the adapter of an SGLang server holds no weights of {module!r}; ask the server itself")
        return super().tensor_hashes(module)

    def weight_bytes(self) -> int:
        """Of the mirror."""
        return sum(tensor.nbytes for tensor in self.components.transformer.state_dict().values())

    def sleep(self, keep: Keep = "all") -> None:
        del keep
        raise RequestError("an SGLang engine does not give its memory back: it shares its GPU with no trainer")

    def close(self) -> None:
        if hasattr(self, "_client"):
            self._client.close()
        self._server.close()
        super().close()


def _conditioning(job: Resolved, made: Sequence[Made]) -> Conditioning:
    """One row a sample, in its order."""
    positive: dict[str, dict[str, Tensor]] = {}
    negative: dict[str, dict[str, Tensor]] = {}
    for prompt, one in zip(job.prompts, made, strict=True):
        if one.positive is not None:
            positive[prompt] = one.positive
        if one.negative is not None:
            negative[prompt] = one.negative
    return Conditioning(
        positive=join_rows([positive[prompt] for prompt in job.prompts]),
        negative=join_rows([negative[prompt] for prompt in job.prompts]) if negative else None,
        geometry=job.geometry,
    )
