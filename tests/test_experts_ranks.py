"""Two FSDP2 ranks whose rows belong to different experts: neither waits forever, and gradients are one rank's."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_fixtures import leave_and_exit, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from verst.families import Components, recognise
from verst.families.tiny import build_tiny
from verst.trainer.parallel import shard
from verst.types import Conditioning

SIGMAS = (0.95, 0.3)
"""Of rank 0 and rank 1: one on each side of the boundary."""


def _load(folder: Path) -> Components:
    family = recognise(folder)
    components = family.load(folder, parts=("transformer",), dtype=torch.float32, device=torch.device("cpu"))
    components.transformer.requires_grad_(True)
    return components


def _loss(components: Components, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    rows = {"encoder_hidden_states": torch.randn(1, 6, 32, generator=generator)}
    v = components.family.velocity(
        components.transformer,
        {"visual": torch.randn(1, 4, 2, 4, 4, generator=generator)},
        {"visual": torch.tensor([SIGMAS[rank]])},
        Conditioning(positive=rows, negative=None),
        guidance_scale=1.0,
    )
    return v["visual"].pow(2).mean()


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    components = _load(folder / "model")
    mesh = init_device_mesh("cpu", (2,))
    shard(components.transformer, blocks=components.family.fsdp_blocks, mesh=mesh, compute_dtype=torch.float32)
    loss = _loss(components, rank)
    loss.backward()
    gradients = _gradients(components.transformer)
    torch.save({"loss": loss.detach(), "gradients": gradients}, folder / f"rank{rank}")
    leave_and_exit()


def test_experts_of_two_ranks(tmp_path: Path) -> None:
    build_tiny("wan2.2-a14b", tmp_path / "model")
    run_ranks(__file__, tmp_path)

    alone = _load(tmp_path / "model")
    losses = [_loss(alone, rank) for rank in range(2)]
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    expected = _gradients(alone.transformer)
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}")
        assert torch.equal(found["loss"], losses[rank].detach())
        assert found["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.allclose(found["gradients"][name], gradient, atol=1e-7), name


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
