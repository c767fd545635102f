"""An engine of two ranks over gloo makes what an engine of one makes, takes weights on both, and ends with either."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_fixtures import keys, made
from rank_fixtures import run_ranks
from torch import Tensor

from verst.engine.client import EngineClient
from verst.engine.ranked import Follower, LeadWorker
from verst.engine.ranks import Call, EngineRanks, Meeting
from verst.engine.request import GenerateRequest
from verst.engine.server import EngineServer
from verst.engine.wire import to_microgroup
from verst.engine.worker import Worker
from verst.errors import EngineError, SyncError
from verst.families.tiny import build_tiny
from verst.types import Microgroup
from verst.weights.manifest import Certificate, Manifest
from verst.weights.receive import WeightReceiver
from verst.weights.send import Outgoing
from verst.weights.transports.shm import ShmSender

CPU = torch.device("cpu")
BOUND = 1e-5
"""Largest difference of a latent after all steps with a ring, relative to the largest value; of a log-prob, absolute."""


def asks(**changes: Any) -> GenerateRequest:
    values: dict[str, Any] = {
        "prompts": ("a cat", "a longer prompt of a dog"),
        "seeds": (11, 12),
        "height": 32,
        "width": 64,
        "num_inference_steps": 3,
        "guidance_scale": 1.0,
        "max_sequence_length": 32,
        "rollout_sde_step_indices": (1, 2),
        "rollout_return_dit_trajectory": True,
        "rollout_return_denoising_env": True,
        "share_denoising_env": True,
        "media_format": "uint8",
    }
    return GenerateRequest(**{**values, **changes})


SHARED = {"prompts": None, "prompt": "a cat", "initial_seeds": (5, 5), "rollout_share_prefix": True}
BATCHES: dict[str, list[list[GenerateRequest]]] = {
    "sd3": [
        [asks()],
        [asks(guidance_scale=3.0, guidance_passes="two", **SHARED), asks(guidance_scale=3.0, guidance_passes="two")],
    ],
    "wan2.1": [[asks(width=32, num_frames=5, guidance_scale=3.0)]],
}


@dataclass(kw_only=True)
class Case:
    family: str
    ring: bool = False
    does: str = "generate"
    found: dict[str, Any] = field(default_factory=dict)


CASES = {
    "sd3_ulysses": Case(family="sd3"),
    "sd3_ring": Case(family="sd3", ring=True),
    "wan_ulysses": Case(family="wan2.1"),
    "wan_ring": Case(family="wan2.1", ring=True),
    "served": Case(family="sd3", does="serve"),
    "weights": Case(family="sd3", does="take_weights"),
    "deaf": Case(family="sd3", does="lose_weights"),
    "lost": Case(family="sd3", does="lose_rank"),
}


class DeafReceiver(WeightReceiver):
    """Whatever it is sent, it cannot read it."""

    def apply(self, manifest: Manifest) -> Certificate:
        raise SyncError("its memory cannot be opened here. Nothing was changed.")


class DeafFollower(Follower):
    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self._receiver = DeafReceiver(self._components.transformer, device=CPU)


class DyingFollower(Follower):
    """Its process ends in the middle of the second forward."""

    forwards = 0

    def _forward(self, call: Call) -> None:
        self.forwards += 1
        if self.forwards == 2:
            os._exit(7)
        super()._forward(call)


FOLLOWERS = {"lose_weights": DeafFollower, "lose_rank": DyingFollower}


def trained(worker: Worker) -> dict[str, Tensor]:
    """Weights that are not the worker's."""
    named = worker.components.transformer.named_parameters()
    return {n: p + torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) / 10 for n, p in named}


def publish(sender: ShmSender, tensors: dict[str, Tensor], *, version: int) -> Manifest:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    manifest = sender.publish(Outgoing(version=version, tensors=tensors, dtypes=dtypes, lora=None))
    assert manifest is not None
    return manifest


def generate(worker: Worker, family: str) -> list[Microgroup]:
    return [microgroup for batch in BATCHES[family] for microgroup in made(worker, *batch)]


def lead(case: Case, model: Path, meeting: Meeting) -> dict[str, Any]:
    """What rank 0 sees of a case."""
    if case.does == "serve":
        return {"microgroups": serve(model, meeting, case.family)}
    ranks = EngineRanks(meeting, device=CPU)
    worker = LeadWorker(model, ranks=ranks)
    found: dict[str, Any] = {}
    sender = ShmSender(rank=0, bucket_bytes=2**20)
    if case.does == "generate":
        found["microgroups"] = generate(worker, case.family)
    elif case.does == "take_weights":
        found |= take_weights(worker, sender, case.family)
    elif case.does == "lose_weights":
        with pytest.raises(SyncError) as lost:
            worker.update_from_manifest(publish(sender, trained(worker), version=3))
        with pytest.raises(EngineError) as refused:
            generate(worker, case.family)
        found |= {"lost": str(lost.value), "refused": str(refused.value), "version": worker.weight_version}
    else:
        with pytest.raises(EngineError) as gone:
            generate(worker, case.family)
        with pytest.raises(RuntimeError) as dead:
            worker.probe()
        found |= {"gone": str(gone.value), "dead": str(dead.value)}
    sender.close()
    worker.close()
    return found


def take_weights(worker: LeadWorker, sender: ShmSender, family: str) -> dict[str, Any]:
    good = trained(worker)
    bad = {**good, "nobody.weight": good["proj_out.weight"]}
    del bad["proj_out.weight"]
    with pytest.raises(SyncError) as refused:
        worker.update_from_manifest(publish(sender, bad, version=2))
    with pytest.raises(SyncError) as disk:
        worker.update_from_tensors(good, module="transformer")
    before = generate(worker, family)
    certificate = worker.update_from_manifest(publish(sender, good, version=3))
    worker.sleep()
    worker.wake()
    return {
        "refused": str(refused.value),
        "disk": str(disk.value),
        "before": before,
        "certificate": certificate,
        "microgroups": generate(worker, family),
    }


def serve(model: Path, meeting: Meeting, family: str) -> list[Microgroup]:
    server = EngineServer(model, meeting=meeting)
    server.start()
    server.wait_ready(60)

    async def ask() -> list[Microgroup]:
        async with EngineClient(server.url) as client:
            requests = [request for batch in BATCHES[family] for request in batch]
            await client.release_memory()
            await client.resume_memory()
            return [to_microgroup(await client.generate(r), keys(r.merged().num_samples)) for r in requests]

    made = asyncio.run(ask())
    server.stop()
    return made


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for name, case in CASES.items():
        store = dist.FileStore(str(folder / f"{name}.store"), 2)
        store.set_timeout(timedelta(seconds=120))
        meeting = Meeting(store=store, rank=rank, ulysses=1 if case.ring else 2, ring=2 if case.ring else 1)
        model = folder / case.family
        if rank == 0:
            torch.save(lead(case, model, meeting), folder / f"{name}.found")
            continue
        ranks = EngineRanks(meeting, device=CPU)
        make = FOLLOWERS.get(case.does, Follower)
        make(model, ranks=ranks).follow()
    sys.stdout.flush()
    os._exit(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints, and what rank 0 saw of each case."""
    folder = tmp_path_factory.mktemp("engine_ranks")
    for family in sorted({case.family for case in CASES.values()}):
        build_tiny(family, folder / family)
    run_ranks(__file__, folder, codes=(0, 7))
    return folder


def found(folder: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = torch.load(folder / f"{name}.found", weights_only=False)
    return result


def largest_difference(ours: list[Microgroup], theirs: list[Microgroup]) -> tuple[float, float]:
    """(of latents, relative to the largest; of log-probs)"""
    pairs = [
        (a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one.samples, other.samples, strict=True)
    ]
    latents = [(a.streams["visual"].latents, b.streams["visual"].latents) for a, b in pairs]
    log_probs = [(a.streams["visual"].log_probs, b.streams["visual"].log_probs) for a, b in pairs]
    largest = max(float(b.abs().max()) for _, b in latents)
    of_latents, of_log_probs = (max(float((a - b).abs().max()) for a, b in x) for x in (latents, log_probs))
    return of_latents / largest, of_log_probs


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.does in ("generate", "serve")])
def test_two_ranks_make_what_one_makes(folder: Path, name: str) -> None:
    case = CASES[name]
    worker = Worker(folder / case.family)
    if case.does == "serve":
        alone = [made(worker, request)[0] for batch in BATCHES[case.family] for request in batch]
    else:
        alone = generate(worker, case.family)
    ours = found(folder, name)["microgroups"]
    of_latents, of_log_probs = largest_difference(ours, alone)
    if case.ring:
        assert 0.0 < of_latents <= BOUND
        assert of_log_probs <= BOUND
        return
    # A trainer's forward gives the log-probs of an engine of one rank to the bit (tests/test_engine_worker.py).
    assert (of_latents, of_log_probs) == (0.0, 0.0)
    assert all(torch.equal(a.samples[0].media, b.samples[0].media) for a, b in zip(ours, alone, strict=True))


def test_all_ranks_take_weights(folder: Path) -> None:
    seen, worker = found(folder, "weights"), Worker(folder / "sd3")
    assert largest_difference(seen["before"], generate(worker, "sd3")) == (0.0, 0.0)
    assert seen["refused"].startswith("rank 0 of the engine: ")
    assert "nobody.weight" in seen["refused"]
    assert "an engine of 2 ranks takes weights that all of them can read" in seen["disk"]
    sender, tensors = ShmSender(rank=0, bucket_bytes=2**20), trained(worker)
    assert seen["certificate"] == worker.update_from_manifest(publish(sender, tensors, version=3))
    sender.close()
    after = generate(worker, "sd3")
    assert largest_difference(seen["microgroups"], after) == (0.0, 0.0)
    assert largest_difference(seen["before"], after)[0] > 1e-3


def test_weights_that_one_rank_did_not_take_are_nobodys(folder: Path) -> None:
    seen = found(folder, "deaf")
    assert seen["lost"].startswith(
        "rank 1 of the engine does not hold what the others hold: its memory cannot be opened"
    )
    assert "the engine's weights are not whole: rank 1 of the engine" in seen["refused"]
    assert seen["version"] == -1


def test_a_lost_rank_is_the_end_of_the_engine(folder: Path) -> None:
    seen = found(folder, "lost")
    assert seen["gone"].startswith("the 2 ranks of this engine lost each other: ")
    assert seen["dead"] == seen["gone"]


class Answers:
    """An actor's method: the outcomes of its calls, in order."""

    def __init__(self, *outcomes: Any) -> None:
        self._outcomes = list(outcomes)

    async def remote(self, *args: Any) -> Any:
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@dataclass
class Actor:
    start: Answers
    open: Answers | None = None
    follow: Answers | None = None


@pytest.mark.parametrize("outcome", [AssertionError("rank 0 says what to condition on first"), None])
def test_a_rank_that_fails_ends_the_engine_with_its_reason(outcome: AssertionError | None) -> None:
    from verst.cluster.engines import EngineProcesses

    lead = Actor(start=Answers("http://127.0.0.1:1"), open=Answers(("127.0.0.1", 7)))
    follower = Actor(start=Answers(None), follow=Answers(outcome))
    ended: list[str] = []

    async def live() -> str:
        engine = EngineProcesses(lead, [follower], lost=ended.append)
        url = await engine.start(1.0, None)
        for _ in range(10):
            await asyncio.sleep(0)
        await engine.close()
        return url

    assert asyncio.run(live()) == "http://127.0.0.1:1"
    assert ended == ([str(outcome)] if outcome else [])


@pytest.mark.parametrize("failing", ["engine", "engine rank 1"])
def test_a_rank_that_cannot_start_is_the_engines_failure(failing: str) -> None:
    from verst.cluster.engines import EngineProcesses

    reason = EngineError("no room for the model")
    starts = {"engine": Answers("http://127.0.0.1:1"), "engine rank 1": Answers(None), failing: Answers(reason)}
    lead = Actor(start=starts["engine"], open=Answers(("127.0.0.1", 7)))
    engine = EngineProcesses(lead, [Actor(start=starts["engine rank 1"])], lost=lambda reason: None)
    with pytest.raises(EngineError, match="no room for the model"):
        asyncio.run(engine.start(1.0, None))


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
