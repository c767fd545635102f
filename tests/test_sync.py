"""Transports between processes, merged LoRA, and what happens to an engine when a hand-off goes wrong half way."""

from __future__ import annotations

import copy
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sync_processes as far
import torch
from run_fixtures import recipe_with, tiny_model
from sync_processes import SPEC, base_module, lora_pairs, receiver_of, tensors_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from trainer_fixtures import LORA, one_rank

from verst.config import sections as s
from verst.config.sync import chosen
from verst.errors import ConfigError, SyncError
from verst.trainer.parallel import open_store
from verst.trainer.topology import Place, choose, here
from verst.weights.lora import LoraSpec, attach_lora, target_layers
from verst.weights.manifest import Manifest, verify
from verst.weights.parking import Parking
from verst.weights.send import LoraForm, Outgoing
from verst.weights.transports import CollectiveSender, DiskSender, Sender, ShmSender

CPU = torch.device("cpu")


@pytest.fixture
def module() -> nn.Module:
    return base_module(tiny_model())


def outgoing(
    tensors: dict[str, Tensor], *, version: int = 3, lora: LoraSpec | None = None, form: LoraForm = "pairs"
) -> Outgoing:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return Outgoing(version=version, tensors=tensors, dtypes=dtypes, lora=lora, form=form)


def published(sender: Sender, *what: Any, **more: Any) -> Manifest:
    manifest = sender.publish(outgoing(*what, **more), receivers=1)
    assert manifest is not None
    return manifest


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# -- between processes


@pytest.fixture(scope="module")
def take() -> Iterator[Callable[[Manifest], dict[str, Any]]]:
    with far.engine(tiny_model()) as ask:
        yield ask


@pytest.mark.parametrize("kind", ["shm", "disk"])
def test_engine_in_another_process_takes_the_weights(
    kind: str, module: nn.Module, tmp_path: Path, take: Callable[[Manifest], dict[str, Any]]
) -> None:
    sender: Sender = (
        ShmSender(rank=0, bucket_bytes=20_000)
        if kind == "shm"
        else DiskSender(tmp_path / "sync", rank=0, bucket_bytes=20_000, digest="sha256")
    )
    tensors = tensors_of(module, seed=len(kind))
    manifest = published(sender, tensors)
    assert len(manifest["buckets"]) > 3
    taken = take(manifest)
    verify(manifest, taken["certificate"], engine="far")
    assert taken["sums"] == far.sums_of(tensors)
    sender.close()


def test_two_sharded_ranks_broadcast_to_an_engine(module: nn.Module, tmp_path: Path) -> None:
    """Two trainer ranks with FSDP2's shards, one engine: full weights, then other weights over the same group."""
    results = far.run_collective(tmp_path, tiny_model())
    for version in (1, 2):
        expected = far.sums_of(tensors_of(module, seed=version))
        engine = results["engine"][version]
        assert engine["sums"] == expected
        assert engine["certificate"]["digest"] == results["rank0"][version] == far.digest_of(expected_tensors(version))
        assert results["rank1"][version] is None


def expected_tensors(seed: int) -> dict[str, Tensor]:
    return tensors_of(base_module(tiny_model()), seed=seed)


# -- the collective transport in threads of one process


@contextmanager
def collective(*, timeout_s: float = 20.0) -> Iterator[CollectiveSender]:
    store = open_store("127.0.0.1", 0, rank=0, world_size=1)
    sender = CollectiveSender(
        store,
        host="127.0.0.1",
        port=store.port,
        device=CPU,
        rank=0,
        ranks=1,
        bucket_bytes=20_000,
        timeout_s=timeout_s,
    )
    yield sender
    sender.close()


def beside(call: Callable[[], Any]) -> Callable[[], Any]:
    """`call` in a thread; what comes back waits for it and returns or raises what it did."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(call())
        except SyncError as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    def result() -> Any:
        thread.join()
        if isinstance(outcome[0], SyncError):
            raise outcome[0]
        return outcome[0]

    return result


def test_one_engine_that_refuses_keeps_all_of_them_on_the_old_weights(module: nn.Module) -> None:
    good, wrong = module, copy.deepcopy(module)
    wrong.stranger = nn.Linear(2, 2)
    before = state_of(good)
    with collective() as sender:
        manifest = sender.publish(outgoing(tensors_of(module, seed=1)), receivers=2)
        assert manifest is not None
        sent = beside(sender.send)
        taken = beside(lambda: receiver_of(good).apply(manifest))
        with pytest.raises(SyncError, match=r"held by the engine but not sent: stranger\.bias"):
            receiver_of(wrong).apply(manifest)
        with pytest.raises(SyncError, match=r"were not sent: .*stranger\.bias"):
            sent()
        with pytest.raises(SyncError, match=r"the trainer sent nothing: .*stranger.*Nothing was changed"):
            taken()
        assert same(state_of(good), before)


def test_a_restarted_engine_is_let_in_by_publishing_again(module: nn.Module) -> None:
    with collective() as sender:
        receiver = receiver_of(module)
        for version in (1, 2):
            manifest = published(sender, tensors_of(module, seed=version), version=version)
            taken = beside(lambda manifest=manifest: receiver.apply(manifest))
            assert sender.send() == taken()["digest"]
        fresh = copy.deepcopy(module)
        restarted = receiver_of(fresh)
        manifest = published(sender, tensors_of(module, seed=3), version=3)
        sent = beside(sender.send)
        with pytest.raises(SyncError, match="joined after the group was made; publish again"):
            restarted.apply(manifest)
        with pytest.raises(SyncError, match="publish again"):
            sent()
        manifest = published(sender, tensors := tensors_of(module, seed=3), version=3)
        taken = beside(lambda: restarted.apply(manifest))
        sender.send()
        taken()
        assert same(state_of(fresh), tensors)
        restarted.close()
        receiver.close()


def test_an_engine_that_never_comes_is_named_in_time(module: nn.Module) -> None:
    with collective(timeout_s=0.2) as sender:
        published(sender, tensors_of(module, seed=1))
        with pytest.raises(SyncError, match=r"0 of 1 engines were ready after 0\.2 s \(sync\.timeout_s\)"):
            sender.send()


def test_a_sender_that_dies_in_the_middle_leaves_the_engine_refusing(module: nn.Module, tmp_path: Path) -> None:
    receiver = receiver_of(module)
    with (
        far.dying_sender(tmp_path, tiny_model()) as manifest,
        pytest.raises(SyncError, match="broke off in the middle"),
    ):
        receiver.apply(manifest)
    assert receiver.invalid == "the update to version 1 broke off in the middle"
    sender = ShmSender(rank=0, bucket_bytes=2**20)
    receiver.apply(published(sender, tensors := tensors_of(module, seed=2)))
    assert receiver.invalid is None
    assert same(state_of(module), tensors)
    sender.close()


# -- disk


def test_disk_keeps_two_versions_and_leaves_nothing(module: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "weights_00000099").mkdir()  # of a run that was killed
    sender = DiskSender(tmp_path, rank=0, bucket_bytes=2**20)
    for version in (1, 2, 3):
        manifest = published(sender, tensors := tensors_of(module, seed=version), version=version)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["weights_00000002", "weights_00000003"]
    late = copy.deepcopy(module)
    receiver_of(late).apply(manifest)
    assert same(state_of(late), tensors)
    sender.close()
    assert list(tmp_path.iterdir()) == []


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message", "invalid"),
    [
        (cut_short, r"cannot be read .*Nothing was changed", None),
        (Path.unlink, r"cannot be read .*do not share that folder \(sync\.folder\)", None),
        (one_bit, "was damaged on its way", "version 3 arrived damaged"),
    ],
)
def test_damaged_files_are_refused(
    module: nn.Module, tmp_path: Path, damage: Callable[[Path], None], message: str, invalid: str | None
) -> None:
    sender = DiskSender(tmp_path, rank=0, bucket_bytes=20_000)
    manifest = published(sender, tensors_of(module, seed=1))
    damage(Path(manifest["buckets"][-1]["handle"]))
    receiver, before = receiver_of(module), state_of(module)
    with pytest.raises(SyncError, match=message):
        receiver.apply(manifest)
    assert receiver.invalid == invalid
    assert same(state_of(module), before) == (invalid is None)
    sender.close()


# -- merged LoRA


def merged_by_hand(base: nn.Module, pairs: dict[str, Tensor]) -> dict[str, Tensor]:
    """float64: base + (alpha / r) B A of every adapted layer."""
    out = {}
    for name, layer in target_layers(base, SPEC).items():
        a, b = (pairs[f"{name}.lora_{side}.default.weight"].double() for side in "AB")
        out[f"{name}.weight"] = layer.weight.detach().double() + SPEC.alpha / SPEC.rank * (b @ a)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_is_rounded_once_and_does_not_drift(module: nn.Module, dtype: torch.dtype) -> None:
    base = copy.deepcopy(module).to(dtype)
    engine, fresh = copy.deepcopy(base), copy.deepcopy(base)
    receiver, sender = receiver_of(engine), ShmSender(rank=0, bucket_bytes=2**20)
    untouched = {n: p for n, p in state_of(base).items() if n.removesuffix(".weight") not in target_layers(base, SPEC)}
    for version in range(20):
        pairs = lora_pairs(module, seed=version)
        manifest = published(sender, pairs, lora=SPEC, form="merged", version=version)
        verify(manifest, receiver.apply(manifest), engine="e")
    assert receiver.holds_merged_lora
    held = state_of(engine)
    for name, exact in merged_by_hand(base, pairs).items():
        # Half a unit in the last place by the one rounding, and fp32's own error of the sum.
        torch.testing.assert_close(
            held[name].double(),
            exact,
            rtol=torch.finfo(dtype).eps * 0.51 if dtype != torch.float32 else 1e-6,
            atol=1e-6,
        )
    assert all(torch.equal(held[name], value) for name, value in untouched.items())
    receiver_of(fresh).apply(manifest)
    assert same(held, state_of(fresh))
    sender.close()


def test_a_merged_lora_gives_its_memory_back_in_sleep(module: nn.Module) -> None:
    """The merged weights lie in one tensor, which nothing may hold while the layers' own memory is parked."""
    base, receiver, parking = copy.deepcopy(module), receiver_of(module), Parking()
    first, second = lora_pairs(module, seed=1), lora_pairs(module, seed=2)
    sender = ShmSender(rank=0, bucket_bytes=2**20)
    receiver.apply(published(sender, first, lora=SPEC, form="merged"))
    layers = target_layers(module, SPEC).values()
    places = [StorageWeakRef(layer.weight.untyped_storage()) for layer in layers]
    receiver.to(torch.device("cpu"))
    for layer in layers:  # as on a GPU, whose memory parking does not keep
        layer.weight.data = layer.weight.data.clone()
    parking.park(list(module.parameters()))
    assert all(place.expired() for place in places)
    parking.restore()
    receiver.to(torch.device("cpu"))
    receiver.apply(published(sender, second, lora=SPEC, form="merged", version=2))
    held = state_of(module)
    for name, exact in merged_by_hand(base, second).items():
        torch.testing.assert_close(held[name].double(), exact, rtol=1e-6, atol=1e-6)
    sender.close()


def test_merged_engine_equals_the_merged_export(module: nn.Module) -> None:
    """PEFT's own merge, which `verst export --what pipeline` writes."""
    pairs = lora_pairs(module, seed=5)
    exported: Any = copy.deepcopy(module)
    attach_lora(exported, SPEC)
    with torch.no_grad():
        for name, p in exported.named_parameters():
            if name in pairs:
                p.copy_(pairs[name])
    exported.fuse_lora()
    exported.unload_lora()
    sender = ShmSender(rank=0, bucket_bytes=2**20)
    receiver_of(module).apply(published(sender, pairs, lora=SPEC, form="merged"))
    sender.close()
    held = state_of(module)
    for name, p in exported.named_parameters():
        torch.testing.assert_close(held[name], p.detach(), rtol=0, atol=1e-6)


def test_other_form_than_held_is_refused(module: nn.Module) -> None:
    receiver, sender = receiver_of(module), ShmSender(rank=0, bucket_bytes=2**20)
    pairs = lora_pairs(module, seed=1)
    receiver.apply(published(sender, pairs, lora=SPEC, form="merged"))
    before = state_of(module)
    with pytest.raises(
        SyncError, match=r"in the form 'pairs' was sent to an engine that holds .* in the form 'merged'"
    ):
        receiver.apply(published(sender, pairs, lora=SPEC))
    with pytest.raises(SyncError, match="full weights were sent to an engine that holds a LoRA"):
        receiver.apply(published(sender, tensors_of(module, seed=2)))
    renamed = {f"x.{name}" if "to_q" in name else name: value for name, value in pairs.items()}
    with pytest.raises(SyncError, match="sent but unknown to the engine: x"):
        receiver.apply(published(sender, renamed, lora=SPEC, form="merged"))
    assert same(state_of(module), before)
    assert receiver.invalid is None
    sender.close()


def test_trainer_sends_pairs_in_fp32_where_the_engine_merges(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, LORA, 'sync={type="auto", lora="merged_in_engine"}', "model.dtype=bfloat16")
    with one_rank(recipe) as trainer:
        manifest = trainer.publish(1)
        assert manifest is not None
        assert manifest["finetune"]["form"] == "merged"
        assert {e["dtype"] for bucket in manifest["buckets"] for e in bucket["tensors"]} == {"float32"}
        engine = base_module(tiny_model()).bfloat16()
        before = state_of(engine)
        verify(manifest, receiver_of(engine).apply(manifest), engine="e")
        assert same(state_of(engine), before)  # B starts at 0
        trainer.unpublish()


# -- which transport


def place(host: str, device: str) -> Place:
    return Place(host=host, device=device)


@pytest.mark.parametrize(
    ("trainers", "engines", "name"),
    [
        (["a cpu"], ["a cpu", "a cpu"], "shm"),
        (["a cpu", "b cpu"], ["b cpu"], "collective"),
        (["a 0"], ["a 0"], "cuda_ipc"),
        (["a 0", "a 1"], ["a 0"], "cuda_ipc"),
        (["a 0"], ["a 1"], "collective"),
        (["a 0", "a 1"], ["b 2", "b 3"], "collective"),
        (["a 0", "a 1"], ["a 0", "a 1"], "shm"),
        (["a 0"], ["a cpu"], "shm"),
    ],
)
def test_transport_follows_from_where_the_processes_are(trainers: list[str], engines: list[str], name: str) -> None:
    picked, why = choose(*([place(*p.split()) for p in side] for side in (trainers, engines)))
    assert picked == name
    assert why


def test_colocated_engines_take_weights_from_the_rank_beside_them() -> None:
    gpus, cpus = [place("a", "0"), place("b", "0")], [place("a", "cpu"), place("b", "cpu")]
    assert choose(gpus, gpus, colocated=True)[0] == "cuda_ipc"
    assert choose(cpus, cpus, colocated=True)[0] == "shm"


def test_no_transport_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"some of which share a GPU .*sync\.type = disk with a sync\.folder"):
        choose([place("a", "0"), place("b", "1")], [place("a", "0"), place("b", "1")])


def test_processes_of_one_host_are_in_one_place() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(here, (CPU,)) == here(CPU)


def test_choice_keeps_what_was_asked_for() -> None:
    auto = s.AutoSync(lora="merged_in_engine", bucket_bytes=7, digest="sha256")
    assert chosen(auto, "shm") == s.ShmSync(lora="merged_in_engine", bucket_bytes=7, digest="sha256")
    with pytest.raises(ConfigError, match=r"sync\.digest = sha256 .*chose collective here: use multilinear"):
        chosen(auto, "collective")


def test_merging_needs_a_lora(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sync\.lora = merged_in_engine needs model\.finetune\.type = lora"):
        recipe_with(tmp_path, 'sync={type="shm", lora="merged_in_engine"}')
    with pytest.raises(ConfigError, match=r"sync\.type = 'nccl': .*valid: .*'collective'"):
        recipe_with(tmp_path, "sync.type=nccl")
