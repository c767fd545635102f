"""Every family with its tokens cut over two ranks: the velocity and gradients of one rank."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_fixtures import leave_and_exit, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from verst.errors import ConfigError
from verst.families import FAMILIES, Components, recognise
from verst.families.sequence import SequenceGroups, SplitsSequence, check_degrees, split_sequence
from verst.families.tensor import SplitsTensors, check_tensor_degree, split_tensors
from verst.trainer.recompute import recompute_blocks
from verst.trainer.whole import add_parts, full
from verst.weights.lora import adaptable

NAMES = (
    "sd3.5",
    "flux1",
    "flux2-klein",
    "qwen-image",
    "qwen-image-edit",
    "krea2",
    "z-image",
    "wan2.1",
    "wan2.2-ti2v-5b",
    "hunyuanvideo",
    "hunyuanvideo1.5",
    "ltx2",
    "cosmos3",
    "cosmos-predict2.5",
    "minimax-h3",
    "sana",
    "qwen-image-2.1",
)
RINGS = ("sd3.5", "flux1", "flux2-klein", "wan2.1", "ltx2", "cosmos-predict2.5", "minimax-h3", "sana")
TENSORS = ("sd3.5", "qwen-image", "qwen-image-edit", "qwen-image-2.1")
LIMITS: dict[str, Any] = {"hunyuanvideo1.5": {"max_sequence_length": 24}}
ROUNDED = ("wan2.2-ti2v-5b", "hunyuanvideo1.5", "ltx2", "cosmos3", "sana")
"""Their matrices of fewer rows go through other kernels on a CPU, and sana adds up over ranks; Ulysses gives all others
the same bits as one rank."""
BOUND = 5e-6
"""Largest difference of a velocity or gradient, relative to the largest value. A ring adds in another order."""


def _load(folder: Path) -> Components:
    components = recognise(folder).load(folder, parts=("transformer",), dtype=torch.float32, device=torch.device("cpu"))
    components.transformer.requires_grad_(True)
    return components


def _run(components: Components, case: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Velocity and gradients of its mean square."""
    velocity = components.family.velocity(
        components.transformer,
        case["latents"],
        case["sigmas"],
        case["conditioning"],
        guidance_scale=case["guidance_scale"],
    )
    torch.stack([v.pow(2).mean() for v in velocity.values()]).sum().backward()
    gradients = {n: p.grad for n, p in components.transformer.named_parameters() if p.grad is not None}
    return {name: v.detach() for name, v in velocity.items()}, gradients


def _split(transformer: nn.Module, plan: Any, blocks: tuple[str, ...], *, ring: bool) -> None:
    """Every other block computes its forward, exchanges included, again in the backward."""
    whole = _whole()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    groups = SequenceGroups(ranks=whole, ulysses=alone if ring else whole, ring=whole if ring else alone)
    for model in adaptable(transformer):
        split = split_sequence(model, plan, groups)
        recompute_blocks(model, blocks, every=2, split=split)


def _difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    largest = max(float(v.abs().max()) for v in theirs.values())
    return max(float((ours[name] - v).abs().max()) for name, v in theirs.items()) / largest


def _of_cut_layers(case: dict[str, Any], expected: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Any]:
    components = _load(case["model"])
    assert isinstance(components.family, SplitsTensors)
    parts = split_tensors(components.transformer, components.family.tensor_plan, init_device_mesh("cpu", (2,)))
    velocity, found = _run(components, case)
    add_parts([p for name, p in components.transformer.named_parameters() if name in parts], _whole())
    named = components.transformer.named_parameters()
    cut = [name for name, p in named if isinstance(p, DTensor) and p.to_local().numel() < p.numel()]
    return {
        "velocity": _difference(velocity, expected),
        "gradients": _difference({name: full(gradient) for name, gradient in found.items()}, gradients),
        "parts": len(parts),
        "cut": len(cut),
    }


def _whole() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    for path in sorted(folder.glob("*.case")):
        case = torch.load(path, weights_only=False)
        expected, expected_gradients = _run(_load(case["model"]), case)
        found = {}
        for layout in ("ulysses", "ring") if path.stem in RINGS else ("ulysses",):
            components = _load(case["model"])
            assert isinstance(components.family, SplitsSequence)
            family = components.family
            _split(components.transformer, family.sequence_plan, family.fsdp_blocks, ring=layout == "ring")
            velocity, gradients = _run(components, case)
            for gradient in gradients.values():
                dist.all_reduce(gradient)
                gradient /= 2
            found[layout] = {
                "same_bits": all(torch.equal(velocity[name], v) for name, v in expected.items()),
                "velocity": _difference(velocity, expected),
                "gradients": _difference(gradients, expected_gradients),
            }
        if isinstance(components.family, SplitsTensors):
            found["tensor"] = _of_cut_layers(case, expected, expected_gradients)
        torch.save(found, path.with_suffix(f".rank{rank}"))
    leave_and_exit()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    # Not at the top: the ranks would take seconds for it.
    from family_fixtures import velocity_case

    folder = tmp_path_factory.mktemp("sequence")
    for name in NAMES:
        torch.save(velocity_case(name, **LIMITS.get(name, {})), folder / f"{name}.case")
    run_ranks(__file__, folder)
    return {name: [torch.load(folder / f"{name}.rank{rank}") for rank in range(2)] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_tokens_over_two_ranks(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    for layout in ("ulysses", "ring") if name in RINGS else ("ulysses",):
        for rank in range(2):
            result = found[name][rank][layout]
            assert result["velocity"] <= (BOUND if layout == "ring" or name in ROUNDED else 0.0), (layout, rank, result)
            assert result["gradients"] <= BOUND, (layout, rank, result)


@pytest.mark.parametrize("name", TENSORS)
def test_layers_over_two_ranks(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in range(2):
        result = found[name][rank]["tensor"]
        assert result["velocity"] <= BOUND, (rank, result)
        assert result["gradients"] <= BOUND, (rank, result)
        assert result["parts"] > 0
        assert result["cut"] > 10


def test_every_family_is_tested() -> None:
    from family_fixtures import tiny_folder

    planned = {family.name for family in FAMILIES.values() if isinstance(family, SplitsSequence)}
    tested = {recognise(tiny_folder(name)).name for name in NAMES}
    assert planned - tested == {"flux2", "qwen_image_edit_plus", "qwen_image_layered", "wan_i2v"}
    assert {family.name for family in FAMILIES.values()} == planned
    cut = {family.name for family in FAMILIES.values() if isinstance(family, SplitsTensors)}
    assert cut - {recognise(tiny_folder(name)).name for name in TENSORS} == {
        "qwen_image_edit_plus",
        "qwen_image_layered",
    }


def test_table_of_families_in_the_docs() -> None:
    """docs/parallel.md says of every pipeline class what its plan says."""
    page = (Path(__file__).parents[1] / "docs" / "parallel.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "Pipeline`" in line]
    said = {row[1].strip("`"): (tuple(re.findall(r"`(\w+)`", row[2])), *row[3:]) for row in rows}
    plans = {name: family.sequence_plan for name, family in FAMILIES.items() if isinstance(family, SplitsSequence)}
    cut = {name: "yes" if isinstance(family, SplitsTensors) else "no" for name, family in FAMILIES.items()}
    assert said == {name: (plan.heads, "yes", plan.ring or "yes", cut[name]) for name, plan in plans.items()}
    assert said.keys() == FAMILIES.keys()


def test_degrees_that_do_not_fit() -> None:
    sd3, krea2 = FAMILIES["StableDiffusion3Pipeline"], FAMILIES["Krea2Pipeline"]
    config = {"num_attention_heads": 24}
    check_degrees("sd3", sd3, config, ulysses=8, ring=5)
    with pytest.raises(ConfigError, match=r"ulysses = 5 does not divide the 24 heads of sd3; nearest that does: 4"):
        check_degrees("sd3", sd3, config, ulysses=5, ring=1)
    with pytest.raises(ConfigError, match=r"ring = 2: krea2 masks the padding of its text; use ring = 1 and ulysses"):
        check_degrees("krea2", krea2, config, ulysses=1, ring=2)
    with pytest.raises(
        ConfigError, match=r"engine\.parallel\.ring = 2: the tokens of another cannot be cut over ranks"
    ):
        check_degrees("another", object(), config, ulysses=1, ring=2, table="engine.parallel")
    check_tensor_degree("sd3", sd3, config, 8)
    with pytest.raises(ConfigError, match=r"tensor = 5 does not divide the 24 heads of sd3; nearest that does: 4"):
        check_tensor_degree("sd3", sd3, config, 5)
    with pytest.raises(
        ConfigError, match=r"tensor = 2: the layers of krea2 are not cut over ranks; use tensor = 1 and"
    ):
        check_tensor_degree("krea2", krea2, config, 2)
    with pytest.raises(
        ConfigError, match=r"tensor = 2 with model\.fp32_modules = norm_out: what stays fp32 stays whole"
    ):
        check_tensor_degree("sd3", sd3, config, 2, fp32_modules=("norm_out",))


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
