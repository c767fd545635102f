"""The weight hand-off: what is sent arrives exactly, or nothing changes and an error says why."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from run_fixtures import tiny_model
from torch import Tensor, nn

from verst.errors import ConfigError, SyncError
from verst.families import recognise
from verst.types import Conditioning
from verst.weights.block import SharedBlock, open_block
from verst.weights.digest import digest_of
from verst.weights.fill import Filler
from verst.weights.lora import LoraSpec, attach_lora, is_lora_parameter, lora_spec_of
from verst.weights.manifest import Certificate, Manifest, aligned, bucket_size, pack, verify, view_in
from verst.weights.receive import WeightReceiver
from verst.weights.send import LoraForm, Outgoing, trained_tensors
from verst.weights.transports import ShmSender

FAMILY = recognise(tiny_model())
SPEC = LoraSpec(rank=2, alpha=4.0, targets=FAMILY.lora_targets)


@pytest.fixture(scope="module")
def base() -> nn.Module:
    """The tiny SD3 transformer; tests copy it."""
    parts = FAMILY.load(tiny_model(), parts=("transformer",), dtype=torch.float32, device=torch.device("cpu"))
    return parts.transformer


@pytest.fixture
def engine(base: nn.Module) -> nn.Module:
    return copy.deepcopy(base)


def changed(module: nn.Module, *, only_lora: bool = False) -> nn.Module:
    """Every trained parameter moved a little, by fixed random numbers."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if is_lora_parameter(name) or not only_lora:
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return module


@pytest.fixture
def full_sender(base: nn.Module) -> nn.Module:
    return changed(copy.deepcopy(base))


@pytest.fixture
def lora_sender(base: nn.Module) -> nn.Module:
    sender = copy.deepcopy(base)
    attach_lora(sender, SPEC)
    return changed(sender, only_lora=True)


def lora_tensors(sender: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in sender.named_parameters() if is_lora_parameter(name)}


def full_tensors(sender: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in sender.named_parameters()}


@torch.no_grad()
def velocity(module: nn.Module) -> Tensor:
    """On a fixed input."""
    generator = torch.Generator().manual_seed(5)
    conditioning = Conditioning(
        positive={
            "encoder_hidden_states": torch.randn(2, 24, 32, generator=generator),
            "pooled_projections": torch.randn(2, 32, generator=generator),
        },
        negative=None,
    )
    latents = {"visual": torch.randn(2, 4, 8, 8, generator=generator)}
    sigmas = {"visual": torch.tensor([0.9, 0.3])}
    return FAMILY.velocity(module, latents, sigmas, conditioning, guidance_scale=1.0)["visual"]


def outgoing_of(tensors: Mapping[str, Tensor], *, lora: LoraSpec | None = None, form: LoraForm = "pairs") -> Outgoing:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return Outgoing(version=7, tensors=tensors, dtypes=dtypes, lora=lora, form=form)


class Published:
    """Publications in shared memory that a test may spoil on their way; closed at the end."""

    def __init__(self) -> None:
        self._open: list[ShmSender] = []

    def __call__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        lora: LoraSpec | None = None,
        form: LoraForm = "pairs",
        bucket_bytes: int = 2**20,
    ) -> Manifest:
        sender = ShmSender(rank=0, bucket_bytes=bucket_bytes)
        self._open.append(sender)
        manifest = sender.publish(outgoing_of(tensors, lora=lora, form=form))
        assert manifest is not None
        return manifest

    def close(self) -> None:
        for sender in self._open:
            sender.close()


def apply_manifest(manifest: Manifest, module: nn.Module) -> Certificate:
    """By a receiver of its own, as an engine has one."""
    return WeightReceiver(module, device=torch.device("cpu")).apply(manifest)


@pytest.fixture
def publish() -> Iterator[Published]:
    published = Published()
    yield published
    published.close()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_unchanged(module: nn.Module, before: dict[str, Tensor]) -> None:
    after = state_of(module)
    assert list(after) == list(before)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_buckets_hold_every_tensor_once_at_its_place() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "small": torch.randn(3, generator=generator),
        "half": torch.randn(5, 2, generator=generator).half(),
        "large": torch.randn(100, generator=generator),  # larger than a bucket
        "scalar": torch.tensor(2.5),
        "brain": torch.randn(7, generator=generator).bfloat16(),
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    buckets = pack(shapes, {name: tensor.dtype for name, tensor in tensors.items()}, bucket_bytes=160)
    assert [[entry["name"] for entry in bucket] for bucket in buckets] == [
        ["small", "half"],
        ["large"],
        ["scalar", "brain"],
    ]
    assert [bucket_size(bucket) for bucket in buckets] == [64 + 20, 400, 64 + 14]
    assert all(entry["offset"] % 64 == 0 for bucket in buckets for entry in bucket)
    for bucket in buckets:
        block = torch.zeros(bucket_size(bucket), dtype=torch.uint8)
        for entry in bucket:
            view_in(block, entry).copy_(tensors[entry["name"]])
        for entry in bucket:
            got = view_in(block, entry)
            assert got.dtype == tensors[entry["name"]].dtype
            assert torch.equal(got, tensors[entry["name"]])


@pytest.mark.parametrize("bucket_bytes", [2**20, 5000])
def test_full_weights_arrive(engine: nn.Module, full_sender: nn.Module, publish: Published, bucket_bytes: int) -> None:
    before = velocity(engine)
    manifest = publish(full_tensors(full_sender), bucket_bytes=bucket_bytes)
    assert len(manifest["buckets"]) == 1 if bucket_bytes == 2**20 else len(manifest["buckets"]) > 20
    certificate = apply_manifest(manifest, engine)
    verify(manifest, certificate, engine="e")
    assert certificate["num_applied"] == len(full_tensors(full_sender)) == 66
    assert certificate["digest"] == digest_of(full_tensors(full_sender))
    assert torch.equal(velocity(engine), velocity(full_sender))
    assert (velocity(engine) - before).abs().max() > 0.01


def test_lora_is_attached_at_first_use_and_arrives(
    engine: nn.Module, base: nn.Module, lora_sender: nn.Module, publish: Published
) -> None:
    manifest = publish(lora_tensors(lora_sender), lora=SPEC)
    certificate = apply_manifest(manifest, engine)
    verify(manifest, certificate, engine="e")
    assert certificate["num_applied"] == 2 * 15  # A and B of 15 layers
    assert lora_spec_of(engine) == LoraSpec(rank=2, alpha=4.0, targets=tuple(sorted(FAMILY.lora_targets)))
    assert torch.equal(velocity(engine), velocity(lora_sender))
    assert (velocity(engine) - velocity(base)).abs().max() > 0.01
    assert not any(p.requires_grad for p in engine.parameters())
    changed(lora_sender, only_lora=True)
    again = publish(lora_tensors(lora_sender), lora=SPEC)
    verify(again, apply_manifest(again, engine), engine="e")
    assert torch.equal(velocity(engine), velocity(lora_sender))


def test_half_precision_is_what_the_engine_holds(base: nn.Module, full_sender: nn.Module, publish: Published) -> None:
    engine = copy.deepcopy(base).bfloat16()
    manifest = publish(trained_tensors(full_tensors(full_sender), dtype=torch.bfloat16))
    verify(manifest, apply_manifest(manifest, engine), engine="e")
    assert torch.equal(velocity(engine), velocity(full_sender.bfloat16()))


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a wrapper's prefix does to the names of one layer."""
    return {
        f"_orig_mod.{name}" if name.startswith("transformer_blocks.0.attn.to_q") else name: value
        for name, value in tensors.items()
    }


@pytest.mark.parametrize("attached", [False, True])
def test_renamed_prefix_is_refused_by_name(
    engine: nn.Module, lora_sender: nn.Module, publish: Published, attached: bool
) -> None:
    if attached:
        attach_lora(engine, SPEC)
    before = state_of(engine)
    manifest = publish(renamed(lora_tensors(lora_sender)), lora=SPEC)
    with pytest.raises(SyncError) as error:
        apply_manifest(manifest, engine)
    message = str(error.value)
    assert "28 of 30 tensors match" in message
    assert "sent but unknown to the engine: _orig_mod.transformer_blocks.0.attn.to_q.lora_A" in message
    assert "held by the engine but not sent: transformer_blocks.0.attn.to_q.lora_A" in message
    assert_unchanged(engine, before)


def test_adapter_that_matches_nothing_is_refused(
    engine: nn.Module, lora_sender: nn.Module, full_sender: nn.Module, publish: Published
) -> None:
    before = state_of(engine)
    foreign = {f"unet.{name}": value for name, value in lora_tensors(lora_sender).items()}
    with pytest.raises(SyncError, match="0 of 30 tensors match"):
        apply_manifest(publish(foreign, lora=SPEC), engine)
    nowhere = LoraSpec(rank=2, alpha=4.0, targets=("down_blocks.to_q",))
    with pytest.raises(SyncError, match=r"down_blocks\.to_q match no linear layer of SD3Transformer2DModel"):
        apply_manifest(publish(foreign, lora=nowhere), engine)
    assert_unchanged(engine, before)
    assert lora_spec_of(engine) is None
    # The engine is none the worse for it: right weights still arrive.
    manifest = publish(full_tensors(full_sender))
    verify(manifest, apply_manifest(manifest, engine), engine="e")


def test_missing_tensor_is_refused_by_name(engine: nn.Module, full_sender: nn.Module, publish: Published) -> None:
    before = state_of(engine)
    tensors = full_tensors(full_sender)
    del tensors["proj_out.weight"]
    with pytest.raises(SyncError, match=r"65 of 66 tensors match; held by the engine but not sent: proj_out\.weight"):
        apply_manifest(publish(tensors), engine)
    assert_unchanged(engine, before)


def test_sync_of_nothing_is_refused(engine: nn.Module, lora_sender: nn.Module, publish: Published) -> None:
    with pytest.raises(SyncError, match="0 of 66 tensors match"):
        apply_manifest(publish({}), engine)
    with pytest.raises(SyncError, match="0 of 30 tensors match"):
        apply_manifest(publish({}, lora=SPEC), engine)
    with pytest.raises(SyncError, match="0 of 0 tensors match"):
        apply_manifest(publish({}), nn.Module())
    manifest = publish(lora_tensors(lora_sender), lora=SPEC)
    nothing = Certificate(version=7, num_applied=0, digest=manifest["digest"])
    with pytest.raises(SyncError, match="engine one did not take the weights: num_applied is 0, expected 30"):
        verify(manifest, nothing, engine="one")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.bfloat16(), r"proj_out\.bias was sent as bfloat16\[16\], the engine holds float32\[16\]"),
        (lambda t: t[:8], r"proj_out\.bias was sent as float32\[8\], the engine holds float32\[16\]"),
    ],
)
def test_other_shape_or_dtype_is_refused(
    engine: nn.Module, full_sender: nn.Module, publish: Published, spoil: object, message: str
) -> None:
    before = state_of(engine)
    tensors = full_tensors(full_sender)
    tensors["proj_out.bias"] = spoil(tensors["proj_out.bias"])  # type: ignore[operator]
    with pytest.raises(SyncError, match=message):
        apply_manifest(publish(tensors), engine)
    assert_unchanged(engine, before)


def test_other_bytes_than_announced_are_found_out_and_made_good(
    engine: nn.Module, full_sender: nn.Module, publish: Published
) -> None:
    manifest = publish(full_tensors(full_sender))
    with open_block(manifest["buckets"][0]["handle"], manifest["buckets"][0]["nbytes"]) as block:
        block[0] ^= 1  # one bit, after the digest was taken
        del block
    receiver = WeightReceiver(engine, device=torch.device("cpu"))
    with pytest.raises(
        SyncError, match=r"digest of what the engine holds is multilinear:\w+, expected multilinear:\w+"
    ):
        receiver.apply(manifest)
    assert receiver.invalid == "version 7 arrived damaged"
    good = publish(full_tensors(full_sender))
    verify(good, receiver.apply(good), engine="e")
    assert receiver.invalid is None


def test_other_version_is_found_out(engine: nn.Module, full_sender: nn.Module, publish: Published) -> None:
    manifest = publish(full_tensors(full_sender))
    certificate = apply_manifest(manifest, engine)
    assert certificate["version"] == 7
    with pytest.raises(SyncError, match="version is 6, expected 7"):
        verify(manifest, Certificate(**{**certificate, "version": 6}), engine="e")


def test_other_lora_than_held_is_refused(
    engine: nn.Module, lora_sender: nn.Module, full_sender: nn.Module, publish: Published
) -> None:
    tensors = lora_tensors(lora_sender)
    apply_manifest(publish(tensors, lora=SPEC), engine)
    before = state_of(engine)
    for other in (
        LoraSpec(rank=4, alpha=4.0, targets=SPEC.targets),
        LoraSpec(rank=2, alpha=8.0, targets=SPEC.targets),  # the same tensors, another update
        LoraSpec(rank=2, alpha=4.0, targets=SPEC.targets[:4]),
    ):
        with pytest.raises(SyncError, match="restart the engine"):
            apply_manifest(publish(tensors, lora=other), engine)
    with pytest.raises(SyncError, match="full weights were sent to an engine that holds a LoRA"):
        apply_manifest(publish(full_tensors(full_sender)), engine)
    assert_unchanged(engine, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused_by_name(full_sender: nn.Module, value: float) -> None:
    tensors = full_tensors(full_sender)
    tensors["proj_out.bias"][3] = value
    with pytest.raises(SyncError, match=r"weights of version 7 are not finite: proj_out\.bias$"):
        ShmSender(rank=0, bucket_bytes=2**20).publish(outgoing_of(tensors))


def test_block_is_gone_after_release(engine: nn.Module, full_sender: nn.Module) -> None:
    before = state_of(engine)
    sender = ShmSender(rank=0, bucket_bytes=5000)
    manifest = sender.publish(outgoing_of(full_tensors(full_sender)))
    assert manifest is not None
    sender.release()
    with pytest.raises(SyncError, match=r"cannot be opened \(No such file or directory\): the sender has ended"):
        apply_manifest(manifest, engine)
    assert_unchanged(engine, before)


@pytest.mark.parametrize("form", ["pairs", "merged"])
def test_late_lora_receiver_is_left_as_it_was(engine: nn.Module, lora_sender: nn.Module, form: LoraForm) -> None:
    before = state_of(engine)
    sender = ShmSender(rank=0, bucket_bytes=2**20)
    manifest = sender.publish(outgoing_of(lora_tensors(lora_sender), lora=SPEC, form=form))
    assert manifest is not None
    sender.release()
    receiver = WeightReceiver(engine, device=torch.device("cpu"))
    with pytest.raises(SyncError, match="cannot be opened"):
        receiver.apply(manifest)
    assert_unchanged(engine, before)
    assert (receiver.invalid, receiver.holds_merged_lora) == (None, False)


def test_block_of_another_size_is_refused() -> None:
    block = SharedBlock(128)
    with pytest.raises(SyncError, match="holds 128 bytes, announced were 256"), open_block(block.handle, 256):
        pass
    block.close()


SENDER = """
import time, torch
from verst.weights.send import Outgoing
from verst.weights.transports import ShmSender
sender = ShmSender(rank=0, bucket_bytes=2**20)
out = Outgoing(version=1, tensors={"w": torch.arange(5.0)}, dtypes={"w": torch.float32}, lora=None)
bucket = sender.publish(out)["buckets"][0]
print(bucket["handle"], bucket["nbytes"], flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the block is a temporary file")
def test_killed_sender_leaves_no_memory_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    sender = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None
    handle, nbytes = sender.stdout.readline().split()
    with open_block(handle, int(nbytes)) as block:
        assert torch.equal(block.view(torch.float32).clone(), torch.arange(5.0))
        del block
    sender.send_signal(signal.SIGKILL)
    sender.wait()
    with pytest.raises(SyncError, match="the sender has ended"), open_block(handle, int(nbytes)):
        pass
    left = set(os.listdir("/dev/shm")) - before
    assert [name for name in left if "verst" in name or Path(f"/dev/shm/{name}").stat().st_size == int(nbytes)] == []
    sender.stdout.close()


def test_targets_that_match_no_layer_are_refused(engine: nn.Module) -> None:
    before = state_of(engine)
    spec = LoraSpec(rank=2, alpha=4.0, targets=("attn.to_q", "attn.qkv"))
    with pytest.raises(ConfigError, match=r"LoRA targets attn\.qkv match no linear layer of SD3Transformer2DModel"):
        attach_lora(engine, spec)
    assert_unchanged(engine, before)


def test_lora_starts_as_the_base_and_trains_only_itself(engine: nn.Module, base: nn.Module) -> None:
    assert attach_lora(engine, SPEC) == 15
    assert torch.equal(velocity(engine), velocity(base))
    trained = [name for name, p in engine.named_parameters() if p.requires_grad]
    assert len(trained) == 30
    assert all(is_lora_parameter(name) for name in trained)


@pytest.mark.parametrize("dtypes", [[torch.bfloat16] * 3, [torch.float32, torch.bfloat16, torch.float32]])
def test_filled_bucket_with_one_bad_value_names_its_tensor(dtypes: list[torch.dtype]) -> None:
    tensors = {"first": torch.ones(3), "second": torch.ones(5, 2), "third": torch.ones(1)}
    outgoing = Outgoing(version=3, tensors=tensors, dtypes=dict(zip(tensors, dtypes, strict=True)), lora=None)
    (entries,) = outgoing.layout(2**20)
    block = torch.zeros(aligned(bucket_size(entries)), dtype=torch.uint8)
    filler = Filler([view_in(block, entry) for entry in entries])
    assert filler.fill(outgoing.sources(entries), check=True).broken.tolist() == [0, 0, 0]
    tensors["second"][4, 1] = float("-inf")
    assert filler.fill(outgoing.sources(entries), check=True).broken.tolist() == [0, 1, 0]
    with pytest.raises(SyncError, match=r"weights of version 3 are not finite: second$"):
        outgoing.check_finite(outgoing.fill(block, entries), entries)
