"""The optimizers of a recipe: their numbers, their state in checkpoints, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_fixtures import leave_and_exit, run_ranks
from run_fixtures import recipe_with
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_fixtures import CALM_ADAM, largest_difference, one_rank, shares_of

from verst.config.sections import TrainerConfig
from verst.errors import ConfigError
from verst.trainer import checkpoint
from verst.trainer.adamw_8bit import AdamW8bit, dynamic_map
from verst.trainer.core import TileLoss, Trainer
from verst.trainer.parallel import join_mesh, leave_mesh, open_store
from verst.trainer.whole import full, reduce_whole

EIGHT_BITS: dict[str, Any] = {"optimizer": {"type": "adamw_8bit"}, "betas": (0.8, 0.9), "weight_decay": 0.1}


def net_of(*, rows: int = 24) -> nn.Sequential:
    """A layer whose rows are whole blocks of 256 values, and one whose moments stay as they are."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, rows), nn.Tanh(), nn.Linear(rows, 3))


def trainer_of(net: nn.Module, **config: Any) -> Trainer:
    return Trainer({"net": net}, TrainerConfig(tile_size=1, lr=1e-3, **config), total_steps=8)


def take_steps(trainer: Trainer, steps: range) -> None:
    net = trainer.modules["net"]
    for step in steps:
        x = torch.randn(4, 512, generator=torch.Generator().manual_seed(step))
        trainer.step([lambda x=x: TileLoss(loss=(net(x) - 1).square().mean())])


@pytest.fixture
def one_rank_mesh() -> Iterator[Any]:
    store = open_store("127.0.0.1", 0, rank=0, world_size=1)
    join_mesh(rank=0, world_size=1, store=store, device=torch.device("cpu"))
    yield init_device_mesh("cpu", (1,))
    leave_mesh()


def test_implementations_of_adamw_agree_over_shards_and_islands(tmp_path: Path) -> None:
    weights = {}
    for name in ("auto", "for_loop", "foreach", "fused"):
        recipe = recipe_with(
            tmp_path,
            CALM_ADAM,
            "model.dtype=bfloat16",
            'model.fp32_modules=["norm_out"]',
            "rollout.num_groups=1",
            f'trainer.optimizer={{type="adamw", implementation="{name}"}}',
        )
        with one_rank(recipe) as trainer:
            before = trainer.weights()
            trainer.update(shares_of(recipe)[0])
            weights[name] = trainer.weights()
    assert largest_difference(weights["auto"], weights["for_loop"]) == 0.0
    assert largest_difference(weights["auto"], before) > 1e-5
    for name in ("foreach", "fused"):
        assert largest_difference(weights["auto"], weights[name]) < 1e-7


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum: float) -> None:
    net = nn.Linear(3, 1, bias=False)
    trainer = trainer_of(net, optimizer={"type": "sgd", "momentum": momentum}, weight_decay=0.1, grad_clip=1e9)
    w, v = net.weight.detach().double().numpy()[0], np.zeros(3)
    for step in range(4):
        x = torch.randn(3, generator=torch.Generator().manual_seed(step))
        trainer.step([lambda x=x: TileLoss(loss=net(x).square().sum())])
        g = 2 * (w @ x.double().numpy()) * x.double().numpy() + 0.1 * w
        v = momentum * v + g
        w = w - 1e-3 * v
    assert np.abs(net.weight.detach().double().numpy()[0] - w).max() < 1e-6
    assert {name for name in trainer.tensors() if "momentum" in name} == (
        {"optimizer.net.weight.momentum_buffer"} if momentum else set()
    )


def test_moments_of_8_bits() -> None:
    """2.03 bytes a parameter, and the steps are AdamW's but for the rounding of the moments."""
    net, plain = net_of(), net_of()
    trainer = trainer_of(net, **EIGHT_BITS)
    exact = trainer_of(plain, betas=EIGHT_BITS["betas"], weight_decay=0.1)
    start = {name: p.detach().clone() for name, p in exact.named.items()}
    take_steps(trainer, range(6))
    take_steps(exact, range(6))
    state = trainer.tensors()
    packed = {name: value for name, value in state.items() if name.startswith("optimizer.net.0.weight.exp")}
    assert {name.rpartition(".")[2]: (value.dtype, tuple(value.shape)) for name, value in packed.items()} == {
        "codes": (torch.uint8, (24, 512)),
        "scale": (torch.float32, (24, 2)),
    }
    assert sum(value.nbytes for value in packed.values()) == 2 * (24 * 512 + 24 * 2 * 4)
    assert state["optimizer.net.2.weight.exp_avg"].dtype == torch.float32
    moved = float((exact.named["net.0.weight"].detach() - start["net.0.weight"]).abs().mean())
    apart = float((exact.named["net.0.weight"] - trainer.named["net.0.weight"]).detach().abs().mean())
    assert 0 < apart < 0.05 * moved


def test_a_checkpoint_of_8_bits_goes_on_with_the_same_bits(tmp_path: Path, one_rank_mesh: Any) -> None:
    """Written from shards; read into shards, and into a model that is whole."""
    sharded = net_of()
    fully_shard(sharded, mesh=one_rank_mesh)
    trainer = trainer_of(sharded, **EIGHT_BITS)
    take_steps(trainer, range(3))
    checkpoint.write_tensors(checkpoint.partial_folder(tmp_path, 1), trainer.tensors(), alone=True)
    folder = checkpoint.publish(tmp_path, 1, {}, keep=1)
    take_steps(trainer, range(3, 5))
    straight = {name: full(value).clone() for name, value in trainer.tensors().items()}
    for shard in (True, False):
        again = net_of()
        if shard:
            fully_shard(again, mesh=one_rank_mesh)
        resumed = trainer_of(again, **EIGHT_BITS)
        checkpoint.read_tensors(folder, resumed.tensors(), alone=True)
        take_steps(resumed, range(3, 5))
        assert resumed.tensors().keys() == straight.keys()
        assert all(torch.equal(full(value).clone(), straight[name]) for name, value in resumed.tensors().items())


def test_blocks_do_not_depend_on_the_rows_that_a_rank_holds() -> None:
    """Three ranks of 24 rows each hold the codes and scales of their rows in the whole."""
    whole = trainer_of(net_of(), grad_clip=1e9, **EIGHT_BITS)
    take_steps(whole, range(1))
    expected = whole.tensors()
    gradient, before = whole.named["net.0.weight"].grad, net_of()[0].weight
    assert gradient is not None
    for rows in torch.arange(24).chunk(3):
        part = nn.Linear(512, len(rows), bias=False)
        part.weight.data = before.detach()[rows].clone()
        alone = Trainer({"net": part}, whole._config, total_steps=8)
        part.weight.grad = gradient[rows].clone()
        alone.optimizer.step()
        for key in ("exp_avg.codes", "exp_avg.scale", "exp_avg_sq.codes", "exp_avg_sq.scale"):
            ours, theirs = alone.tensors()[f"optimizer.net.weight.{key}"], expected[f"optimizer.net.0.weight.{key}"]
            assert torch.equal(ours, theirs[rows]), key


def test_codes_are_the_nearest_of_the_map() -> None:
    """In numpy, over all 256 values; a second moment above 0 is never rounded to 0."""
    optimizer = AdamW8bit(
        [{"params": [p := nn.Parameter(torch.zeros(16, 256))]}], lr=0.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0
    )
    g = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) ** 5
    p.grad = g.clone()
    optimizer.step()
    for moment, value in (("exp_avg", g.numpy()), ("exp_avg_sq", g.numpy() ** 2)):
        table, state = dynamic_map(moment == "exp_avg").numpy(), optimizer.state[p]
        assert len(set(table.tolist())) == 256
        largest = np.abs(value).max(axis=1, keepdims=True)
        assert np.array_equal(state[f"{moment}.scale"].numpy(), largest)
        codes = np.abs((value / largest)[..., None] - table).argmin(axis=-1)
        codes = codes if moment == "exp_avg" else codes.clip(min=1)
        assert (state[f"{moment}.codes"].numpy() != codes).mean() < 1e-3  # Ties are rounded either way.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer.optimizer.type=adam",), r"trainer\.optimizer\.type = 'adam': did you mean 'adamw'\?"),
        (('trainer.optimizer={type="sgd"}', "trainer.betas=[0.9, 0.9]"), r"trainer\.betas = .*\"sgd\".*remove it"),
        (
            ('trainer.optimizer={type="adamw_8bit"}', "trainer.offload.optimizer=true"),
            r"trainer\.offload\.optimizer = true with trainer\.optimizer\.type = \"adamw_8bit\"",
        ),
        (('trainer.optimizer={type="sgd", nesterov=true}',), r"nesterov = true with momentum = 0"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_with(tmp_path, *overrides)


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    net = net_of(rows=25)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    trainer = trainer_of(net, **EIGHT_BITS)
    take_steps(trainer, range(2))
    checkpoint.write_tensors(checkpoint.partial_folder(folder, 1), trainer.tensors(), alone=False)
    held = {name: full(value) for name, value in trainer.tensors().items()}
    torch.save((held, _reduced(rank)), folder / f"held.rank{rank}")
    leave_and_exit()


def _reduced(rank: int) -> list[Tensor | None]:
    """Gradients of whole parameters that both ranks used, that one used, and that none used."""
    both, one, none = (nn.Parameter(torch.zeros(2, 3)) for _ in range(3))
    both.grad = torch.full((2, 3), float(rank))
    one.grad = torch.full((2, 3), 6.0) if rank == 1 else None
    for mesh in (init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))):
        reduce_whole([both, one, none], mesh)
    return [both.grad, one.grad, none.grad]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what both ranks found, and their checkpoint."""
    tmp_path = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, tmp_path)
    checkpoint.publish(tmp_path, 1, {}, keep=1)
    return tmp_path


def test_gradients_of_whole_parameters_are_means_over_ranks(two_ranks: Path) -> None:
    """Of FSDP and of HSDP, whose mean over equal values is the value."""
    for rank in range(2):
        both, one, none = torch.load(two_ranks / f"held.rank{rank}")[1]
        assert torch.equal(both, torch.full((2, 3), 0.5))
        assert torch.equal(one, torch.full((2, 3), 3.0))
        assert none is None


def test_codes_of_two_ranks_go_on_in_one(two_ranks: Path) -> None:
    """25 rows: 13 on one rank, 12 on the other."""
    trainer = trainer_of(net_of(rows=25), **EIGHT_BITS)
    checkpoint.read_tensors(checkpoint.step_folder(two_ranks, 1), trainer.tensors(), alone=True)
    held, tensors = torch.load(two_ranks / "held.rank0")[0], trainer.tensors()
    assert held.keys() == tensors.keys()
    assert held["optimizer.net.0.weight.exp_avg.scale"].shape == (25, 2)
    assert all(torch.equal(held[name], value) for name, value in tensors.items())


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
