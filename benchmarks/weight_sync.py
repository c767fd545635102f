"""Weight sync between a trainer and an engine process, every way against its floor and two baselines.

python benchmarks/weight_sync.py [--repeats 7] [--out FILE] [--device cuda | cpu]

On a GPU: random weights of SD3.5-medium's size in both processes, which share the GPU; a LoRA of rank 32 and the full
model; with a second GPU also the collective transport between the two (NCCL). On a CPU: the CPU transports on a tiny
model, to try the program; those figures mean nothing. A time is from before `publish` until the engine's certificate
is compared, manifest as JSON through a pipe included; medians. The floor is one read and one write of the bytes at
the device's measured copy rate. JSON is written after every way; no file but that one is touched.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.multiprocessing as mp
from real_size import SD35_MEDIUM
from torch import Tensor, nn

from verst.trainer.parallel import open_store
from verst.weights.digest import Ledger, digest_of
from verst.weights.fill import Filler, copy_all
from verst.weights.lora import LoraSpec, attach_lora, is_lora_parameter
from verst.weights.manifest import verify
from verst.weights.receive import WeightReceiver
from verst.weights.send import LoraForm, Outgoing
from verst.weights.transports import CollectiveSender, CudaIpcSender, DiskSender, Sender, ShmSender

import diffusers  # isort: skip  (after verst.families, which makes a torchvision built for another torch importable)

SMALL: dict[str, Any] = {
    **SD35_MEDIUM,
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "caption_projection_dim": 64,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "dual_attention_layers": (0,),
    "pos_embed_max_size": 16,
    "sample_size": 16,
}
# flow_grpo's eight projections.
TARGETS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
)
SPEC = LoraSpec(rank=32, alpha=64.0, targets=TARGETS)
BUCKET_BYTES = 512 * 2**20
Baseline = Callable[["Ends", "Trainer"], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What the trainer's process holds."""

    device: torch.device
    base: nn.Module
    full: dict[str, Tensor]
    """Trained values of every parameter, in the engine's dtype, as a sharded trainer of one rank has them after its cast."""
    pairs: dict[str, Tensor]
    """Trained LoRA parameters, fp32."""


class Ends:
    """The engine process as the trainer sees it."""

    def __init__(self, device: torch.device) -> None:
        self.pipe, theirs = mp.Pipe()
        self._process = mp.get_context("spawn").Process(target=engine, args=(theirs, str(device)), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *message: Any) -> Any:
        self.pipe.send(message)
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(("end",))
        self._process.join(30)


def model(device: torch.device) -> nn.Module:
    """Random weights in bf16 on the device; fp32 and small on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with device:
        module = diffusers.SD3Transformer2DModel(**(SD35_MEDIUM if device.type == "cuda" else SMALL))
    torch.set_default_dtype(torch.float32)
    for p in module.parameters():
        p.data = p.data.to(dtype)
    return module.requires_grad_(False)


def engine(pipe: Connection, device_name: str) -> None:
    """The engine's process: a fresh module for each way, then manifests until the next."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    base = model(device)
    receiver: WeightReceiver | None = None
    holder: dict[str, Tensor] = dict(base.named_parameters())
    while (message := pipe.recv())[0] != "end":
        kind, *content = message
        if kind == "fresh":
            if receiver is not None:
                receiver.close()
            base = receiver = None  # type: ignore[assignment]
            holder = {}
            base = model(device)
            receiver, holder = WeightReceiver(base, device=device), dict(base.named_parameters())
            pipe.send("ready")
        elif kind == "manifest":
            assert receiver is not None
            pipe.send(dict(receiver.apply(json.loads(content[0]))))
        elif kind == "tensors":
            # The baselines': tensors by torch's own pickling, copied one by one.
            for name, value in content[0].items():
                holder[name].copy_(value)
            del content, message
            wait(device)
            pipe.send("taken")
        elif kind == "flat":
            buffer, entries = content
            for name, start, shape in entries:
                count = torch.Size(shape).numel()
                holder[name].copy_(buffer[start : start + count].view(shape))
            del content, message, buffer
            wait(device)
            pipe.send("taken")
        elif kind == "digest":
            pipe.send(digest_of(holder))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trainer_state(device: torch.device) -> Trainer:
    base = model(device)
    generator = torch.Generator(device=device).manual_seed(1)
    full = {
        name: (p + 0.01 * torch.randn(p.shape, generator=generator, device=device)).to(p.dtype)
        for name, p in base.named_parameters()
    }
    with_lora = model(device)
    attach_lora(with_lora, SPEC)
    pairs = {
        name: 0.02 * torch.randn(p.shape, generator=generator, device=device)
        for name, p in with_lora.named_parameters()
        if is_lora_parameter(name)
    }
    return Trainer(device=device, base=base, full=full, pairs=pairs)


def certified(
    ends: Ends,
    trainer: Trainer,
    sender: Sender,
    *,
    lora: bool,
    form: LoraForm = "pairs",
    measure: dict[str, Any],
) -> Callable[[], None]:
    """One hand-off by a transport of verst, certificate compared."""
    tensors = trainer.pairs if lora else trainer.full
    held = next(iter(trainer.full.values())).dtype
    dtypes = dict.fromkeys(tensors, torch.float32 if form == "merged" else held)
    counter = iter(range(10**6))

    def sync() -> None:
        out = Outgoing(version=next(counter), tensors=tensors, dtypes=dtypes, lora=SPEC if lora else None, form=form)
        manifest = sender.publish(out, receivers=1)
        assert manifest is not None
        ends.pipe.send(("manifest", json.dumps(manifest)))
        if not manifest["digest"]:
            manifest = {**manifest, "digest": sender.send() or ""}
        verify(manifest, ends.pipe.recv(), engine="other process")
        sender.release()
        measure["bytes"] = sum(bucket["nbytes"] for bucket in manifest["buckets"])
        measure["tensors"] = len(tensors)

    return sync


def merged_in_trainer(trainer: Trainer) -> dict[str, Tensor]:
    """What the peers do: W + (alpha / r) B A of every adapted layer as new tensors, in the model's dtype."""
    out = dict(trainer.base.named_parameters())
    for name, a in trainer.pairs.items():
        if ".lora_A." not in name:
            continue
        layer, b = name.split(".lora_A.")[0], trainer.pairs[name.replace(".lora_A.", ".lora_B.")]
        weight = out[f"{layer}.weight"]
        out[f"{layer}.weight"] = torch.addmm(
            weight.detach(), b.to(weight.dtype), a.to(weight.dtype), alpha=SPEC.alpha / SPEC.rank
        )
    return out


def bucket_baseline(ends: Ends, trainer: Trainer) -> Callable[[], None]:
    """LoRA merged in the trainer, the whole dict flattened into new buckets, each with an IPC handle of its own."""

    def sync() -> None:
        merged = merged_in_trainer(trainer)
        names, used, buckets = list(merged), 0, [[]]  # type: ignore[var-annotated]
        for name in names:
            size = merged[name].numel() * merged[name].element_size()
            if buckets[-1] and used + size > BUCKET_BYTES:
                buckets.append([])
                used = 0
            buckets[-1].append(name)
            used += size
        for bucket in buckets:
            flat = torch.cat([merged[name].detach().reshape(-1) for name in bucket])
            starts = torch.tensor([0, *(merged[name].numel() for name in bucket)]).cumsum(0).tolist()
            entries = [(name, start, tuple(merged[name].shape)) for name, start in zip(bucket, starts, strict=False)]
            wait(trainer.device)
            assert ends.ask("flat", flat, entries) == "taken"

    return sync


def host_baseline(values: Callable[[], dict[str, Tensor]]) -> Baseline:
    """Through the host: .cpu(), torch's shared memory, copied back by the engine."""

    def make(ends: Ends, trainer: Trainer) -> Callable[[], None]:
        del trainer

        def sync() -> None:
            moved = {name: value.detach().cpu().clone().share_memory_() for name, value in values().items()}
            assert ends.ask("tensors", moved) == "taken"

        return sync

    return make


def timed(call: Callable[[], None], repeats: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds; the first two calls (handles, kernels, plans) are told apart."""
    seconds = []
    for _ in range(repeats + 2):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        seconds.append(1e3 * (time.perf_counter() - start))
    first, rest = seconds[0], seconds[2:]
    return {"median_ms": statistics.median(rest), "min_ms": min(rest), "max_ms": max(rest), "first_ms": first}


def copy_rate(device: torch.device) -> float:
    """Bytes a second read and written by a copy of one large tensor on the device."""
    count = 2**30 if device.type == "cuda" else 2**24
    source, target = (torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2))
    for _ in range(3):
        target.copy_(source)
    wait(device)
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    wait(device)
    return 20 * count / (time.perf_counter() - start)


class Results:
    def __init__(self, path: Path | None, machine: dict[str, Any], rate: float) -> None:
        self._path = path
        self._rate = rate
        self.data: dict[str, Any] = {"machine": machine, "ways": {}}

    def add(self, name: str, row: dict[str, Any]) -> None:
        if "bytes" in row:
            row["floor_ms"] = 2e3 * row["bytes"] / self._rate
            row["times_floor"] = row["median_ms"] / row["floor_ms"]
        self.data["ways"][name] = row
        shown = f"{row['floor_ms']:9.3f} ms floor" if "floor_ms" in row else ""
        print(f"{name:34} {row['median_ms']:10.2f} ms  first {row['first_ms']:9.1f} ms {shown}", flush=True)
        self.write()

    def write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.data, indent=1) + "\n")


def certificate_cost(trainer: Trainer, repeats: int) -> dict[str, dict[str, Any]]:
    """Of one side, alone: what digest and check for finite numbers add to a plain copy of the same tensors."""
    rows = {}
    for name, tensors in (("lora", trainer.pairs), ("full", trainer.full)):
        sources, places = list(tensors.values()), [torch.empty_like(t) for t in tensors.values()]
        filler = Filler(places)
        ledger = Ledger((key, str(t.dtype).removeprefix("torch."), t.shape) for key, t in tensors.items())

        def copied(sources: list[Tensor] = sources, places: list[Tensor] = places) -> None:
            copy_all(places, sources)

        def certified(filler: Filler = filler, ledger: Ledger = ledger, sources: list[Tensor] = sources) -> None:
            ledger.digest(filler.fill(sources, check=True).digests)

        plain, whole = timed(copied, repeats, trainer.device), timed(certified, repeats, trainer.device)
        again = timed(lambda tensors=tensors: digest_of(tensors), repeats, trainer.device)  # type: ignore[misc]
        rows[name] = {
            "copy_ms": plain["median_ms"],
            "copy_digest_and_check_ms": whole["median_ms"],
            "added_ms": whole["median_ms"] - plain["median_ms"],
            "digest_by_a_pass_of_its_own_ms": again["median_ms"],
        }
    return rows


def check_digests(trainer: Trainer) -> bool:
    """The kernel and torch's operations, and the CPU, give one number."""
    sample = dict(list(trainer.full.items())[:6] + list(trainer.pairs.items())[:4])
    return digest_of(sample) == digest_of({name: tensor.cpu() for name, tensor in sample.items()})


def measure_gpu(results: Results, trainer: Trainer, repeats: int) -> None:
    """The ways of one GPU, the most important first."""
    device, ends = trainer.device, Ends(trainer.device)
    results.data["digest_equal_on_cpu_and_gpu"] = check_digests(trainer)
    ipc = {"rank": 0, "bucket_bytes": BUCKET_BYTES}
    ways: list[tuple[str, bool, LoraForm]] = [
        ("lora pairs, cuda_ipc, unmerged", True, "pairs"),
        ("lora pairs, cuda_ipc, merged", True, "merged"),
        ("full, cuda_ipc", False, "pairs"),
    ]
    for name, lora, form in ways:
        ends.ask("fresh")
        measure: dict[str, Any] = {}
        sender = CudaIpcSender(device, **ipc)  # type: ignore[arg-type]
        row = timed(certified(ends, trainer, sender, lora=lora, form=form, measure=measure), repeats, device)
        results.add(name, row | measure)
        sender.close()
    results.data["certificate_of_one_side"] = certificate_cost(trainer, repeats)
    ends.ask("fresh")
    results.add("baseline: merge and bucket ipc", timed(bucket_baseline(ends, trainer), repeats, device))
    few = max(3, repeats // 2)
    ends.ask("fresh")
    results.add(
        "baseline: full through the host", timed(host_baseline(lambda: trainer.full)(ends, trainer), few, device)
    )
    results.add(
        "baseline: merged through the host",
        timed(host_baseline(lambda: merged_in_trainer(trainer))(ends, trainer), few, device),
    )
    ends.close()


def measure_collective(results: Results, trainer: Trainer, engine_device: torch.device, repeats: int) -> None:
    """Trainer on its device, engine on another (or both on the CPU)."""
    ends = Ends(engine_device)
    for lora in (True, False):
        ends.ask("fresh")
        store = open_store("127.0.0.1", 0, rank=0, world_size=1)
        sender = CollectiveSender(
            store,
            host="127.0.0.1",
            port=store.port,
            device=trainer.device,
            rank=0,
            ranks=1,
            bucket_bytes=BUCKET_BYTES,
            timeout_s=60.0,
        )
        measure: dict[str, Any] = {}
        row = timed(certified(ends, trainer, sender, lora=lora, measure=measure), repeats, trainer.device)
        name = f"{'lora pairs' if lora else 'full'}, collective"
        results.add(name, row | measure)
        sender.close()
    ends.close()


def measure_cpu(results: Results, trainer: Trainer, repeats: int) -> None:
    ends = Ends(trainer.device)
    with TemporaryDirectory(prefix="verst-sync-") as folder:
        ways: list[tuple[str, bool, LoraForm, Callable[[], Sender]]] = [
            ("lora pairs, shm, unmerged", True, "pairs", lambda: ShmSender(rank=0, bucket_bytes=BUCKET_BYTES)),
            ("lora pairs, shm, merged", True, "merged", lambda: ShmSender(rank=0, bucket_bytes=BUCKET_BYTES)),
            ("full, shm", False, "pairs", lambda: ShmSender(rank=0, bucket_bytes=BUCKET_BYTES)),
            ("full, disk", False, "pairs", lambda: DiskSender(Path(folder), rank=0, bucket_bytes=BUCKET_BYTES)),
        ]
        for name, lora, form, make in ways:
            ends.ask("fresh")
            measure: dict[str, Any] = {}
            sender = make()
            row = timed(
                certified(ends, trainer, sender, lora=lora, form=form, measure=measure), repeats, trainer.device
            )
            results.add(name, row | measure)
            sender.close()
    results.data["certificate_of_one_side"] = certificate_cost(trainer, repeats)
    ends.ask("fresh")
    results.add("baseline: merge and buckets", timed(bucket_baseline(ends, trainer), repeats, trainer.device))
    ends.close()


def ratios(ways: dict[str, Any]) -> dict[str, float]:
    """How many times faster than each baseline."""
    bases = {name: row["median_ms"] for name, row in ways.items() if name.startswith("baseline")}
    return {
        f"{name} / {base}": slow / row["median_ms"]
        for name, row in ways.items()
        if not name.startswith("baseline")
        for base, slow in bases.items()
    }


def machine(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor(),
        "gpus": torch.cuda.device_count() if cuda else 0,
        "model": "SD3.5-medium's size, random bf16" if cuda else "a small SD3 in fp32: figures mean nothing",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if not cuda:
        print("no GPU: the CPU transports on a small model, to try the program; the figures mean nothing")
    rate = copy_rate(device)
    about = machine(device) | {"copy_bytes_a_second": rate}
    results = Results(arguments.out, about, rate)
    trainer = trainer_state(device)
    if cuda:
        measure_gpu(results, trainer, arguments.repeats)
        if torch.cuda.device_count() > 1:
            measure_collective(results, trainer, torch.device("cuda", 1), arguments.repeats)
    else:
        measure_cpu(results, trainer, arguments.repeats)
        measure_collective(results, trainer, device, arguments.repeats)
    results.data["times_faster"] = ratios(results.data["ways"])
    results.write()
    for name, factor in results.data["times_faster"].items():
        print(f"{factor:8.1f} x  {name}")


if __name__ == "__main__":
    mp.set_start_method("spawn")
    main()
