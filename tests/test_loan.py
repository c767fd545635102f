"""Frozen weights held once: an engine that computes in the trainer's memory, and what becomes of it when that is gone."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import made, request
from run_fixtures import recipe_with, tiny_model
from torch import nn
from trainer_fixtures import LORA, groups_of, more_ranks, one_rank, rank_step, shares_of

from verst.config import load_recipe
from verst.engine.worker import Worker
from verst.errors import ConfigError, EngineError, SyncError
from verst.families import recognise
from verst.trainer.rl import RlTrainer
from verst.weights.loan import Borrower, Lender
from verst.weights.lora import LoraSpec, attach_lora

CPU = torch.device("cpu")
GRPO = Path(__file__).parent / "data" / "grpo.toml"
SHARED = 'cluster.placement={type="colocated", share_base=true}'


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RlTrainer, Worker]]:
    """A trainer rank, and an engine worker in its memory that has taken its LoRA."""
    with one_rank(recipe_with(tmp_path, LORA, SHARED, "sampling.guidance_scale=1.0")) as trainer:
        worker = Worker(tiny_model(), loan=trainer.lend())
        hand_over(trainer, worker, version=0)
        yield trainer, worker


def hand_over(trainer: RlTrainer, worker: Worker, *, version: int) -> None:
    manifest = trainer.publish(version)
    assert manifest is not None
    assert worker.update_from_manifest(manifest)["version"] == version
    trainer.unpublish()


def frozen(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n.replace(".base_layer.", "."): p for n, p in module.named_parameters() if ".lora_" not in n}


def test_the_engine_reads_the_trainers_bytes(pair: tuple[RlTrainer, Worker]):
    trainer, worker = pair
    lent, held = frozen(trainer.transformer), frozen(worker.components.transformer)
    assert lent.keys() == held.keys()
    assert worker.borrowed is not None
    assert worker.borrowed.num_bytes >= sum(p.nbytes for p in held.values())
    with torch.no_grad():
        for number, p in enumerate(lent.values()):
            p.fill_(number)
    for number, p in enumerate(held.values()):
        assert torch.equal(p, torch.full_like(p, number))
    buffers = dict(worker.components.transformer.named_buffers())
    own = dict(trainer.transformer.named_buffers())
    assert buffers
    for name, buffer in buffers.items():
        own[name].fill_(7)
        assert (buffer == 7).all()


def test_outputs_are_those_of_an_engine_with_weights_of_its_own(pair: tuple[RlTrainer, Worker]):
    trainer, worker = pair
    with torch.no_grad():
        for name, p in trainer.core.named.items():
            if ".lora_B." in name:
                p.normal_(generator=torch.Generator().manual_seed(len(name)))
    alone = Worker(tiny_model())
    for engine in (worker, alone):
        hand_over(trainer, engine, version=1)
    (ours,), (theirs,) = made(worker, request()), made(alone, request())
    for a, b in zip(ours.samples, theirs.samples, strict=True):
        assert torch.equal(a.media, b.media)
        assert torch.equal(a.streams["visual"].latents, b.streams["visual"].latents)


def test_updates_keep_the_base_and_the_ratio_is_one(tmp_path: Path, pair: tuple[RlTrainer, Worker]):
    trainer, worker = pair
    recipe = recipe_with(tmp_path, LORA, SHARED)
    before = {name: p.clone() for name, p in frozen(trainer.transformer).items()}
    for version in (1, 2):
        (share,) = shares_of(recipe, worker=worker, rollout=version)
        update = trainer.update(share)
        assert update.grad_norm > 0
        assert update.policy["ratio_max_deviation"] == 0
        hand_over(trainer, worker, version=version)
    assert groups_of(recipe, worker=worker)[0].samples[0].weight_version == 2
    for name, p in frozen(worker.components.transformer).items():
        assert torch.equal(p, before[name])


def test_two_ranks_with_whole_bases_step_as_two_that_shard_theirs(tmp_path: Path):
    two = (LORA, "trainer.ranks=2", "engine.num=2")
    shares = shares_of(recipe_with(tmp_path, *two))
    for name, overrides in {"sharded": two, "whole": (*two, SHARED)}.items():
        torch.save({"recipe": recipe_with(tmp_path, *overrides), "shares": shares}, tmp_path / f"{name}.case")
    more_ranks(rank_step, tmp_path)
    sharded, whole = (torch.load(tmp_path / f"{n}.rank1", weights_only=False) for n in ("sharded", "whole"))
    assert sharded["metrics"] == whole["metrics"]
    assert all(torch.equal(whole["weights"][name], value) for name, value in sharded["weights"].items())
    assert whole["shards"] == sharded["shards"]


def test_nothing_may_write_into_a_borrowed_base(pair: tuple[RlTrainer, Worker], tmp_path: Path):
    trainer, worker = pair
    manifest = trainer.publish(1)
    assert manifest is not None
    before = worker.checksums()
    for finetune in ({"type": "full"}, {**manifest["finetune"], "form": "merged"}):
        with pytest.raises(SyncError, match=r"cluster\.placement\.share_base.*Nothing was changed"):
            worker.update_from_manifest({**manifest, "finetune": finetune})
    with pytest.raises(SyncError, match="which nobody may overwrite"):
        worker.update_from_folder(tiny_model(), modules=["transformer"])
    assert worker.checksums() == before
    assert made(worker, request())


def test_an_engine_asleep_leaves_the_borrowed_base_alone(pair: tuple[RlTrainer, Worker]):
    trainer, worker = pair
    (before,) = made(worker, request())
    weights = {name: p.clone() for name, p in frozen(trainer.transformer).items()}
    own = worker.weight_bytes()
    whole = Worker(tiny_model()).weight_bytes()
    assert 0 < own < whole - sum(p.nbytes for p in weights.values()) * 0.9
    worker.sleep()
    assert worker.weight_bytes() == 0
    assert all(torch.equal(p, weights[name]) for name, p in frozen(trainer.transformer).items())
    worker.wake()
    hand_over(trainer, worker, version=0)
    (after,) = made(worker, request())
    assert all(torch.equal(a.media, b.media) for a, b in zip(before.samples, after.samples, strict=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((SHARED,), r"model\.finetune\.type = full freezes none; use model\.finetune\.type = lora"),
        (
            (SHARED, LORA, "trainer.offload.parameters=true"),
            r"trainer\.offload\.parameters = true keeps the base in host",
        ),
        ((SHARED, LORA, 'sync={type="auto", lora="merged_in_engine"}'), r"use sync\.lora = pairs"),
    ],
)
def test_recipes_that_would_write_the_base_are_refused(overrides: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        load_recipe(GRPO, overrides)


def transformer() -> Any:
    return (
        recognise(tiny_model()).load(tiny_model(), parts=("transformer",), dtype=torch.float32, device=CPU).transformer
    )


def test_small_blocks_and_another_model():
    module = transformer().requires_grad_(False)
    whole = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    lender = Lender(module, device=CPU, bucket_bytes=20_000)
    assert len(lender.loan["buckets"]) > 5
    empty = copy.deepcopy(module).to("meta")
    Borrower(lender.loan, device=CPU).place(empty)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in empty.state_dict().items())
    other = copy.deepcopy(module)
    other.stranger = nn.Linear(2, 2)
    with pytest.raises(SyncError, match=r"not lent \['stranger\.bias', 'stranger\.weight'\]"):
        Borrower(lender.loan, device=CPU).place(other)
    with pytest.raises(SyncError, match="lent were multilinear:other"):
        Borrower({**lender.loan, "digest": "multilinear:other"}, device=CPU)
    lender.close()
    with pytest.raises(SyncError, match="cannot be opened"):
        Borrower(lender.loan, device=CPU)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in module.state_dict().items())


def test_a_lora_is_not_lent():
    module = transformer()
    attach_lora(module, LoraSpec(rank=2, alpha=2.0, targets=("attn.to_q",)))
    for name, p in module.named_parameters():
        p.requires_grad_(".lora_" in name)
    lender = Lender(module, device=CPU)
    names = {entry["name"] for bucket in lender.loan["buckets"] for entry in bucket["tensors"]}
    assert names == set(transformer().state_dict())
    lender.close()


LEND = """
import json, sys, torch
from pathlib import Path
from verst.families import recognise
from verst.weights.loan import Lender
folder = Path(sys.argv[1])
module = recognise(folder).load(folder, parts=("transformer",), dtype=torch.float32, device=torch.device("cpu")).transformer
lender = Lender(module, device=torch.device("cpu"))
print(json.dumps(lender.loan), flush=True)
sys.stdin.readline()
"""


def test_an_engine_whose_trainer_was_killed_refuses_and_leaks_nothing():
    lender = subprocess.Popen(
        [sys.executable, "-c", LEND, str(tiny_model())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert lender.stdout is not None
    loan = json.loads(lender.stdout.readline())
    worker = Worker(tiny_model(), loan=loan)
    assert made(worker, request())[0].samples
    mapped = worker.components.transformer.proj_out.weight
    value = mapped.clone()
    os.kill(lender.pid, signal.SIGKILL)
    lender.communicate()
    with pytest.raises(EngineError, match="has ended or taken them back; restart the engine"):
        made(worker, request())
    assert torch.equal(mapped, value)  # the kernel keeps the memory for whoever still has it
    with pytest.raises(SyncError, match="cannot be opened"):
        Worker(tiny_model(), loan=loan)
