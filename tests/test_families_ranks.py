"""Two FSDP2 ranks whose rows make unlike numbers of forwards: neither waits forever, and gradients are one rank's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_fixtures import leave_and_exit, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from verst.families import Components, recognise
from verst.families.tiny import build_tiny
from verst.trainer.parallel import shard
from verst.types import Conditioning, Geometry

NAMES = ("cosmos3", "minimax-h3", "qwen-image-2.1")
ROWS = (2, 1)
"""Of rank 0 and rank 1; rank 0's differ in noise level and prompt length, and so share no forward."""
GEOMETRY = {
    "cosmos3": Geometry(height=32, width=32, num_frames=5, fps=24.0),
    "minimax-h3": Geometry(height=32, width=32, num_frames=124),
    "qwen-image-2.1": Geometry(height=32, width=32),
}


def _load(folder: Path) -> Components:
    family = recognise(folder)
    components = family.load(folder, parts=("transformer",), dtype=torch.float32, device=torch.device("cpu"))
    components.transformer.requires_grad_(True)
    return components


def _loss(components: Components, name: str, rank: int) -> Tensor:
    rows, generator = ROWS[rank], torch.Generator().manual_seed(rank)
    shapes = components.family.latent_shapes(components, GEOMETRY[name])
    mask = torch.ones(rows, 6, dtype=torch.bool)
    mask[1:, 4:] = False
    if name == "cosmos3":
        text = {"input_ids": torch.randint(0, 200, (rows, 6), generator=generator)}
    elif name == "qwen-image-2.1":
        text = {
            "encoder_hidden_states": torch.randn(rows, 6, 32, generator=generator),
            "encoder_attention_mask": mask.long(),
            "image_slots": torch.zeros(rows, 6, dtype=torch.int64),
        }
    else:
        text = {"encoder_hidden_states": torch.randn(rows, 6, 16, generator=generator)}
    v = components.family.velocity(
        components.transformer,
        {stream: torch.randn((rows, *shape), generator=generator) for stream, shape in shapes.items()},
        {stream: torch.tensor([0.9, 0.4])[:rows] for stream in shapes},
        Conditioning(positive={**text, "text_mask": mask}, negative=None, geometry=GEOMETRY[name]),
        guidance_scale=1.0,
    )
    return torch.stack([value.pow(2).mean() for value in v.values()]).sum()


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name in NAMES:
        components = _load(folder / name)
        shard(components.transformer, blocks=components.family.fsdp_blocks, mesh=mesh, compute_dtype=torch.float32)
        loss = _loss(components, name, rank)
        loss.backward()
        found = {"loss": loss.detach(), "gradients": _gradients(components.transformer)}
        torch.save(found, folder / f"{name}.rank{rank}")
    leave_and_exit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints, and what both ranks found with them."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in NAMES:
        build_tiny(name, folder / name)
    run_ranks(__file__, folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_ranks_make_as_many_forwards(name: str, folder: Path) -> None:
    alone = _load(folder / name)
    losses = [_loss(alone, name, rank) for rank in range(2)]
    (torch.stack(losses).sum() / 2).backward()
    expected = _gradients(alone.transformer)
    for rank in range(2):
        found = torch.load(folder / f"{name}.rank{rank}")
        assert torch.allclose(found["loss"], losses[rank].detach(), rtol=1e-6)
        assert found["gradients"].keys() == expected.keys()
        for parameter, gradient in expected.items():
            bound = 1e-5 * max(float(gradient.abs().max()), 1e-2)
            assert torch.allclose(found["gradients"][parameter], gradient, atol=bound), parameter


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
