"""The model behind an engine: encode, denoise, decode; weights in, checksums out. No HTTP, one thread."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.config.basis import CompileBackend
from verst.engine import module_weights
from verst.engine.guided import Guidance, guided_velocity
from verst.engine.prefix import distinct_rows
from verst.engine.prompts import PromptCache
from verst.engine.records import Decoded, sample_records
from verst.engine.resolve import Resolved
from verst.engine.sleep import Keep, Sleep
from verst.errors import EngineError, InvariantError, RequestError, SyncError
from verst.families import ALL_PARTS, Components, recognise
from verst.families.base import HasSound
from verst.families.compiled import asks_for_gradients, compile_blocks
from verst.flow.controller import join_transitions
from verst.flow.denoise import denoise
from verst.flow.hooks import Rollout, Stream, prepare_rollout
from verst.flow.noise import SampleNoise
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Latents, join_rows
from verst.weights.loan import Borrower, Loan
from verst.weights.lora import adaptable, is_lora_parameter
from verst.weights.manifest import Certificate, Manifest
from verst.weights.receive import WeightReceiver

OnStage = Callable[[int, str, float, float], None]
"""(number of the request in its batch, stage, start, end), on `time.perf_counter()`."""
Schedulers = Mapping[str, FlowMatchEulerDiscreteScheduler]


class Unavailable(EngineError):
    """The engine cannot take the request now, but will later (HTTP 503)."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The rows of one request in a batch."""

    job: Resolved
    rows: slice
    latents: Latents
    """Initial noise."""
    rollout: Rollout
    """Its hooks do nothing for plain sampling."""


class Worker:
    """Owns the loaded model and its weight version. Every method runs on the engine's one worker thread."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        fp32_modules: Sequence[str] = (),
        prompt_cache_bytes: int = 256 * 2**20,
        loan: Loan | None = None,
        compiled: CompileBackend = "off",
        as_trained: bool = True,
    ) -> None:
        """fp32_modules: beside the family's own. loan: the transformer's frozen weights are a trainer's, and only its
        LoRA is held here. compiled: the transformer's blocks, as a trainer compiles them; as_trained: and as they run
        there, for the same bits, which costs some of the speed.

        Raises ModelError for a folder that cannot be loaded, SyncError for a loan that cannot be had.
        """
        self.family = recognise(folder, fp32_modules=fp32_modules)
        self.device = torch.device(device)
        self.borrowed = None if loan is None else Borrower(loan, device=self.device)
        self.components = self._load(folder, dtype)
        self._as_trained = compiled != "off" and as_trained
        for model in adaptable(self.components.transformer):
            compile_blocks(model, self.family.fsdp_blocks, backend=compiled, cut=self._as_trained)
        self.prompt_cache = PromptCache(max_bytes=prompt_cache_bytes)
        self.receiver = WeightReceiver(
            self.components.transformer, device=self.device, base_is_borrowed=loan is not None
        )
        self.weight_version = -1
        """-1 until weights are handed over for the first time."""
        self.asleep = False
        self._sleep = Sleep(self.components, self.receiver, base_is_borrowed=loan is not None)
        self.num_samples = 0
        """Made since the start."""

    def _load(self, folder: Path, dtype: torch.dtype) -> Components:
        if self.borrowed is None:
            return self.family.load(folder, parts=ALL_PARTS, dtype=dtype, device=self.device)
        shell = self.family.load(folder, parts=("transformer",), dtype=dtype, device=torch.device("meta"))
        self.borrowed.place(shell.transformer)
        others = [part for part in ALL_PARTS if part != "transformer"]
        loaded = self.family.load(folder, parts=others, dtype=dtype, device=self.device)
        return replace(loaded, modules={**shell.modules, **loaded.modules})

    def refuse(self, job: Resolved) -> None:
        """Raises RequestError for what the model can and this worker cannot. From any thread."""

    def generate(
        self,
        jobs: Sequence[Resolved],
        *,
        stopped: Callable[[], bool] = lambda: False,
        on_stage: OnStage = lambda job, stage, start_s, end_s: None,
    ) -> list[list[dict[str, Any]] | EngineError]:
        """The samples' records of each request of one batch, in order; all requests have one `join_key`.

        A request whose numbers are not finite gets an EngineError in its place. Raises EngineError when `stopped`
        says so between two steps, Unavailable while memory is released. on_stage: told when what was done.
        """
        if self.asleep:
            raise Unavailable("the engine has released its memory; resume it first")
        if self.receiver.invalid is not None:
            raise EngineError(f"the engine's weights are not whole: {self.receiver.invalid}; send them again")
        if self.borrowed is not None:
            self.borrowed.check()
        start = self._clock()
        conditioning = self._encode(jobs)
        encoded = self._clock()
        schedulers, batch, final = self._denoise(jobs, conditioning, stopped)
        denoised = self._clock()
        for number in range(len(jobs)):
            on_stage(number, "encode", start, encoded)
            on_stage(number, "denoise", encoded, denoised)
        results = []
        for number, part in enumerate(batch):
            begun = self._clock()
            results.append(self._finish(part, schedulers, final, denoised - start))
            on_stage(number, "decode", begun, self._clock())
        return results

    def _encode(self, jobs: Sequence[Resolved]) -> Conditioning:
        def side(job: Resolved, prompts: Sequence[str], *, negative: bool) -> dict[str, Tensor]:
            return self.prompt_cache.rows(
                self.components,
                prompts,
                max_sequence_length=job.max_sequence_length,
                geometry=job.geometry,
                negative=negative,
                images=job.images,
            )

        positive = join_rows([side(job, job.prompts, negative=False) for job in jobs])
        negative = None
        if jobs[0].guided:
            negative = join_rows([side(job, (job.negative_prompt,) * len(job.prompts), negative=True) for job in jobs])
        return Conditioning(positive=positive, negative=negative, geometry=jobs[0].geometry)

    def _denoise(
        self, jobs: Sequence[Resolved], conditioning: Conditioning, stopped: Callable[[], bool]
    ) -> tuple[Schedulers, list[_Row], Latents]:
        first = jobs[0]
        schedulers = self.family.schedule(
            self.components, first.geometry, num_steps=first.num_steps, shift=first.request.sigma_shift
        )
        shapes = self.family.latent_shapes(self.components, first.geometry)
        self._check_streams(schedulers, shapes)
        batch = self._rows(jobs, schedulers, shapes)
        for part in batch:
            part.rollout.init(conditioning.rows(part.rows))
        latents = {name: torch.cat([part.latents[name] for part in batch]).to(self.device) for name in shapes}
        if first.request.rollout:
            latents = {name: x.to(first.storage_dtype).float() for name, x in latents.items()}

        steps = itertools.count()

        def velocity(x: Latents, sigmas: dict[str, Tensor]) -> Latents:
            if stopped():
                raise EngineError("the batch was stopped: nobody waits for it any more, or the engine is shutting down")
            distinct = distinct_rows(jobs, next(steps))
            if distinct is None:
                return self._velocity(x, sigmas, conditioning, Guidance.of(first))
            rows, places = (index.to(self.device) for index in distinct)
            part = [{name: t[rows] for name, t in tensors.items()} for tensors in (x, sigmas)]
            v = self._velocity(part[0], part[1], conditioning, Guidance.of(first), rows=rows)
            return {name: t[places] for name, t in v.items()}

        transitions = {
            name: join_transitions([(len(part.job.seeds), part.rollout.controllers[name]) for part in batch])
            for name in (shapes if first.request.rollout else ())
        }
        return schedulers, batch, denoise(velocity, latents, schedulers, transitions=transitions)

    def _velocity(
        self,
        x: Latents,
        sigmas: dict[str, Tensor],
        conditioning: Conditioning,
        guidance: Guidance,
        *,
        rows: Tensor | None = None,
    ) -> Latents:
        """rows: of the batch's conditioning that `x` and `sigmas` are; None = all."""
        chosen = conditioning if rows is None else conditioning.rows(rows)
        return guided_velocity(self.components, x, sigmas, chosen, guidance, as_trained=self._as_trained)

    def _check_streams(self, schedulers: Schedulers, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if tuple(schedulers) != tuple(shapes) or not set(shapes) <= set(self.family.streams):
            raise InvariantError(
                f"{self.family.name} declares the streams {list(self.family.streams)} and has grids of "
                f"{list(schedulers)}, latent shapes of {list(shapes)}"
            )

    def _rows(
        self, jobs: Sequence[Resolved], schedulers: Schedulers, shapes: Mapping[str, tuple[int, ...]]
    ) -> list[_Row]:
        batch, done = [], 0
        for job in jobs:
            device = self.device if job.generator_device == "cuda" else torch.device("cpu")
            noise = SampleNoise(job.seeds, device=device, initial_seeds=job.request.initial_seeds)
            latents = {name: noise.initial(shape) for name, shape in shapes.items()}
            streams = [
                Stream(
                    name=name,
                    sigmas=schedulers[name].sigmas,
                    latent_shape=tuple(x.shape),
                    noise=noise.steps(name, first=name == self.family.streams[0]),
                )
                for name, x in latents.items()
            ]
            rows = slice(done, done + len(job.seeds))
            rollout = prepare_rollout(job.rollout_options, streams)
            batch.append(_Row(job=job, rows=rows, latents=latents, rollout=rollout))
            done = rows.stop
        return batch

    def _finish(
        self, part: _Row, schedulers: Schedulers, final: Latents, seconds: float
    ) -> list[dict[str, Any]] | EngineError:
        """Decode one request's rows by themselves: the same shape whatever it was joined with. seconds: until then."""
        start = self._clock()
        latents = {name: x[part.rows] for name, x in final.items()}
        rollout = part.rollout.finalize(latents, {name: s.timesteps for name, s in schedulers.items()})
        broken = [f"final latents ({name})" for name, x in latents.items() if not x.isfinite().all()]
        broken += [
            f"log-probs ({name})"
            for name, samples in rollout.trajectories.items()
            if not all(sample.log_probs.isfinite().all() for sample in samples)
        ]
        decoded = self._decode(latents) if part.job.request.return_media and not broken else None
        broken += decoded.not_finite() if decoded is not None else []
        if broken:
            return EngineError(
                f"{', '.join(broken)} of the samples with seeds {list(part.job.seeds)} are not "
                f"finite (weights of version {self.weight_version}, {self.components.dtype})"
            )
        self.num_samples += len(part.job.seeds)
        first, *others = streams = tuple(latents)
        scheduler = schedulers[first]
        facts = {
            "sigmas": scheduler.sigmas.tolist(),
            "extra_stream_sigmas": {name: schedulers[name].sigmas.tolist() for name in others},
            "sigma_shift": scheduler.shift,
            "model_dtype": str(self.components.dtype).removeprefix("torch."),
            "device": self.device.type,
            "batch_rows": len(final[first]),
            "weight_version": self.weight_version,
        }
        return sample_records(
            part.job,
            streams=streams,
            rollout=rollout,
            decoded=decoded,
            facts=facts,
            seconds=seconds + self._clock() - start,
            request_id=str(uuid.uuid4()),
            peak_memory_mb=self._peak_memory_mb(),
        )

    def _decode(self, latents: Latents) -> Decoded:
        pixels = self.family.decode_pixels(self.components, latents)
        sound = self.family.decode_audio(self.components, latents) if isinstance(self.family, HasSound) else None
        audio, sample_rate = sound or (None, None)
        return Decoded(pixels=pixels, audio=audio, sample_rate=sample_rate)

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _peak_memory_mb(self) -> float | None:
        return torch.cuda.max_memory_allocated(self.device) / 2**20 if self.device.type == "cuda" else None

    def probe(self) -> None:
        """Raises RuntimeError when the device no longer computes (after a failed batch)."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if (torch.ones(2, device=self.device) + 1).sum().item() != 4:
            raise RuntimeError(f"{self.device} adds wrongly")

    def update_from_manifest(self, manifest: Manifest) -> Certificate:
        """Take the transformer's weights from the sender.

        Raises SyncError: nothing changed then, or it broke off in the middle, and `generate` refuses until it is made good.
        """
        self._refuse_asleep()
        certificate = self.receiver.apply(manifest)
        if self._as_trained:
            full = manifest["finetune"]["type"] == "full"
            asks_for_gradients(self.components.transformer, lambda name: full or is_lora_parameter(name))
        self.weight_version = certificate["version"]
        return certificate

    def update_from_folder(self, folder: Path, *, modules: Sequence[str], version: int | None = None) -> int:
        """Copy all weights of `modules` from a diffusers folder; returns the number of tensors.

        Raises SyncError, before anything is changed, when names, shapes or values are not right.
        """
        files = [(name, module_weights.read_folder(folder, name)) for name in modules]
        number = self._update(files, complete=True, version=version)
        if {name for name in self.modules if name.startswith("transformer")} <= set(modules):
            self.receiver.invalid = None
        return number

    def update_from_tensors(self, tensors: Mapping[str, Tensor], *, module: str, version: int | None = None) -> int:
        """Copy some of a module's tensors. Raises SyncError like `update_from_folder`."""
        return self._update([(module, tensors)], complete=False, version=version)

    def _update(
        self, updates: Sequence[tuple[str, Mapping[str, Tensor]]], *, complete: bool, version: int | None
    ) -> int:
        self._refuse_asleep()
        if self.receiver.holds_merged_lora:
            raise SyncError(
                "the engine adds a LoRA to weights that it keeps: send it a manifest, or restart the engine"
            )
        if self.borrowed is not None and any(name.startswith("transformer") for name, _ in updates):
            raise SyncError("the engine computes with a trainer's frozen weights, which nobody may overwrite")
        copies = [
            copy
            for name, tensors in updates
            for copy in module_weights.plan_copies(self._module(name), tensors, where=name, complete=complete)
        ]
        with torch.no_grad():
            for own, value in copies:
                own.copy_(value)
        self.weight_version = self.weight_version + 1 if version is None else version
        self.prompt_cache.clear()
        return len(copies)

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """module -> SHA-256 over its tensors; "not_found" for a module that there is not."""
        self._refuse_asleep()
        modules = self.modules
        return {
            name: module_weights.checksum(modules[name]) if name in modules else "not_found"
            for name in (modules if names is None else names)
        }

    def tensor_hashes(self, module: str) -> dict[str, str]:
        """tensor -> SHA-256 over its dtype, shape and bytes. Raises RequestError for an unknown module."""
        self._refuse_asleep()
        return {name: module_weights.tensor_hash(t) for name, t in self._module(module).state_dict().items()}

    def sleep(self, keep: Keep = "all") -> None:
        """Give the memory of the weights back and forget prompt embeddings. Twice is no fault. See `Sleep.begin`."""
        if not self.asleep:
            self._sleep.begin(keep)
            self.prompt_cache.clear()
            self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            self._sleep.end()
            self.asleep = False

    def weight_bytes(self) -> int:
        """Of weights in memory of this process's own: none while it sleeps."""
        return self._sleep.num_bytes()

    def _refuse_asleep(self) -> None:
        if self.asleep:
            raise RequestError("the engine has released its memory: resume it before its weights are changed or read")

    def close(self) -> None:
        """The engine ends: leave the groups that weights came through."""
        self.receiver.close()

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name: m for name, m in self.components.modules.items() if isinstance(m, nn.Module)}

    def _module(self, name: str) -> nn.Module:
        if name not in self.modules:
            raise RequestError(f"the model has no module {name!r}; it has {', '.join(self.modules)}")
        return self.modules[name]
