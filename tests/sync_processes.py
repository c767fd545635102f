"""The other processes of the weight sync's tests: an engine, two sharded trainer ranks, a sender that dies.

python sync_processes.py ROLE FOLDER MODEL
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rank_fixtures import leave_and_exit
from torch import Tensor, nn

from verst.families import recognise
from verst.trainer.parallel import join_mesh, open_store, shard
from verst.weights.digest import digest_of as digest_of
from verst.weights.digest import word_digests
from verst.weights.lora import LoraSpec, target_layers
from verst.weights.manifest import Manifest
from verst.weights.receive import WeightReceiver
from verst.weights.send import Outgoing
from verst.weights.transports import CollectiveSender

CPU = torch.device("cpu")
SPEC = LoraSpec(rank=2, alpha=6.0, targets=("attn.to_q", "attn.to_k", "attn.to_out.0", "ff.net.2"))
VERSIONS = (1, 2)


def base_module(model: Path) -> nn.Module:
    torch.set_num_threads(1)
    family = recognise(model)
    return family.load(model, parts=("transformer",), dtype=torch.float32, device=CPU).transformer


def receiver_of(module: nn.Module) -> WeightReceiver:
    return WeightReceiver(module, device=CPU)


def tensors_of(module: nn.Module, *, seed: int) -> dict[str, Tensor]:
    """Random values of every parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in module.named_parameters()}


def lora_pairs(module: nn.Module, *, seed: int) -> dict[str, Tensor]:
    """Random pairs of SPEC, named as PEFT names them."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, layer in target_layers(module, SPEC).items():
        rows, columns = layer.weight.shape
        pairs[f"{name}.lora_A.default.weight"] = 0.1 * torch.randn(SPEC.rank, columns, generator=generator)
        pairs[f"{name}.lora_B.default.weight"] = 0.1 * torch.randn(rows, SPEC.rank, generator=generator)
    return pairs


def sums_of(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: int(word_digests([tensor])[0]) for name, tensor in tensors.items()}


def take(manifest: Manifest, receiver: WeightReceiver, module: nn.Module) -> dict[str, Any]:
    certificate = receiver.apply(manifest)
    return {"certificate": dict(certificate), "sums": sums_of(dict(module.named_parameters()))}


def _serve(pipe: Any, model: Path) -> None:
    module = base_module(model)
    receiver = receiver_of(module)
    while (text := pipe.recv()) is not None:
        pipe.send(take(json.loads(text), receiver, module))


@contextmanager
def engine(model: Path) -> Iterator[Callable[[Manifest], dict[str, Any]]]:
    """A process with a module; the function makes it take a manifest, which travels as JSON."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, model))
    process.start()
    theirs.close()

    def ask(manifest: Manifest) -> dict[str, Any]:
        ours.send(json.dumps(manifest))
        answer: dict[str, Any] = ours.recv()
        return answer

    try:
        yield ask
    finally:
        ours.send(None)
        process.join(30)
        assert process.exitcode == 0


def _write(path: Path, text: str) -> None:
    path.with_suffix(".partial").write_text(text)
    path.with_suffix(".partial").rename(path)


def _wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.005)
    return path.read_text()


def _store(rank: int, folder: Path, *, ranks: int) -> Any:
    if rank:
        return open_store("127.0.0.1", int(_wait_for(folder / "port")), rank=rank, world_size=ranks)
    store = open_store("127.0.0.1", 0, rank=0, world_size=ranks)
    _write(folder / "port", str(store.port))
    return store


def _sender(store: Any, rank: int, *, ranks: int) -> CollectiveSender:
    return CollectiveSender(
        store,
        host="127.0.0.1",
        port=store.port,
        device=CPU,
        rank=rank,
        ranks=ranks,
        bucket_bytes=20_000,
        timeout_s=60,
    )


def trainer_rank(rank: int, folder: Path, model: Path) -> None:
    """One of two FSDP2 ranks: publishes and sends every version, and notes the digest."""
    store = _store(rank, folder, ranks=2)
    mesh = join_mesh(rank=rank, world_size=2, store=store, device=CPU).fsdp
    module = base_module(model).requires_grad_(True)
    values = {version: tensors_of(module, seed=version) for version in VERSIONS}
    shard(module, blocks=recognise(model).fsdp_blocks, mesh=mesh, compute_dtype=torch.float32)
    sender = _sender(store, rank, ranks=2)
    digests = {}
    for version in VERSIONS:
        named = dict(module.named_parameters())
        with torch.no_grad():
            for name, p in named.items():
                local: Any = p.data
                rows = _chunk(values[version][name], rank)
                local.to_local().copy_(rows)
        out = Outgoing(version=version, tensors=named, dtypes=dict.fromkeys(named, torch.float32), lora=None)
        manifest = sender.publish(out, receivers=1)
        if manifest is not None:
            _write(folder / f"manifest{version}", json.dumps(manifest))
        digests[version] = sender.send()
        sender.release()
    _write(folder / f"rank{rank}.result", json.dumps(digests))
    _wait_for(folder / "engine.result")
    leave_and_exit()


def _chunk(whole: Tensor, rank: int) -> Tensor:
    rows = -(-whole.shape[0] // 2)
    return whole[rank * rows : (rank + 1) * rows]


def engine_process(folder: Path, model: Path) -> None:
    module = base_module(model)
    receiver = receiver_of(module)
    results = {v: take(json.loads(_wait_for(folder / f"manifest{v}")), receiver, module) for v in VERSIONS}
    _write(folder / "engine.result", json.dumps(results))


def dying(folder: Path, model: Path) -> None:
    """Sends the first bucket and ends."""
    sender = _sender(_store(0, folder, ranks=1), 0, ranks=1)
    tensors = tensors_of(base_module(model), seed=1)
    dtypes = dict.fromkeys(tensors, torch.float32)
    out = Outgoing(version=1, tensors=tensors, dtypes=dtypes, lora=None)
    manifest = sender.publish(out, receivers=1)
    assert manifest is not None
    _write(folder / "manifest", json.dumps(manifest))
    sources, count = Outgoing.sources, 0

    def only_first(self: Outgoing, *what: Any) -> list[Tensor]:
        nonlocal count
        count += 1
        if count > 3:
            os._exit(1)
        return sources(self, *what)

    Outgoing.sources = only_first  # type: ignore[method-assign]
    sender.send()


def _start(role: str, folder: Path, model: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, __file__, role, str(folder), str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def run_collective(folder: Path, model: Path, *, timeout_s: float = 120.0) -> dict[str, dict[int, Any]]:
    """What each of two ranks and one engine found, by version."""
    roles = ("rank0", "rank1", "engine")
    processes = [_start(role, folder, model) for role in roles]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(outputs)
    return {
        role: {int(v): found for v, found in json.loads((folder / f"{role}.result").read_text()).items()}
        for role in roles
    }


@contextmanager
def dying_sender(folder: Path, model: Path) -> Iterator[Manifest]:
    """The manifest of a sender that ends while it sends."""
    process = _start("dying", folder, model)
    try:
        manifest: Manifest = json.loads(_wait_for(folder / "manifest"))
        yield manifest
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    role, folder, model = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if role == "dying":
        dying(folder, model)
    elif role == "engine":
        engine_process(folder, model)
    else:
        trainer_rank(int(role.removeprefix("rank")), folder, model)
