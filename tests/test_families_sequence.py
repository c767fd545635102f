"""Every family with its tokens cut over two ranks: the velocity and gradients of one rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_fixtures import leave_and_exit
from torch import Tensor, nn

from verst.errors import ConfigError
from verst.families import FAMILIES, Components, recognise
from verst.families.sequence import SequenceGroups, SplitsSequence, check_degrees, split_sequence
from verst.trainer.recompute import recompute_blocks
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
)
RINGS = ("sd3.5", "flux1", "flux2-klein", "wan2.1", "ltx2", "cosmos-predict2.5", "minimax-h3")
LIMITS: dict[str, Any] = {"hunyuanvideo1.5": {"max_sequence_length": 24}}
ROUNDED = ("wan2.2-ti2v-5b", "hunyuanvideo1.5", "ltx2", "cosmos3")
"""Their matrices of fewer rows go through other kernels on a CPU; Ulysses gives all others the same bits as one rank."""
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
    whole = dist.group.WORLD
    assert whole is not None
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    groups = SequenceGroups(ranks=whole, ulysses=alone if ring else whole, ring=whole if ring else alone)
    for model in adaptable(transformer):
        split = split_sequence(model, plan, groups)
        recompute_blocks(model, blocks, every=2, split=split)


def _difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    largest = max(float(v.abs().max()) for v in theirs.values())
    return max(float((ours[name] - v).abs().max()) for name, v in theirs.items()) / largest


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
        torch.save(found, path.with_suffix(f".rank{rank}"))
    leave_and_exit()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    # Not at the top: the ranks would take seconds for it.
    from family_fixtures import velocity_case

    folder = tmp_path_factory.mktemp("sequence")
    for name in NAMES:
        torch.save(velocity_case(name, **LIMITS.get(name, {})), folder / f"{name}.case")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return {name: [torch.load(folder / f"{name}.rank{rank}") for rank in range(2)] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_tokens_over_two_ranks(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    for layout in ("ulysses", "ring") if name in RINGS else ("ulysses",):
        for rank in range(2):
            result = found[name][rank][layout]
            assert result["velocity"] <= (BOUND if layout == "ring" or name in ROUNDED else 0.0), (layout, rank, result)
            assert result["gradients"] <= BOUND, (layout, rank, result)


def test_every_family_is_tested_or_refused() -> None:
    from family_fixtures import tiny_folder

    planned = {family.name for family in FAMILIES.values() if isinstance(family, SplitsSequence)}
    tested = {recognise(tiny_folder(name)).name for name in NAMES}
    assert planned - tested == {"flux2", "qwen_image_edit_plus", "qwen_image_layered", "wan_i2v"}
    whole = {family.name for family in FAMILIES.values()} - planned
    assert whole == {"qwen_image_21", "sana"}
    for family in FAMILIES.values():
        if family.name in whole:
            with pytest.raises(ConfigError, match=f"ulysses = 2: the tokens of {family.name} cannot be cut"):
                check_degrees(family.name, family, {}, ulysses=2, ring=1)


def test_table_of_families_in_the_docs() -> None:
    """docs/parallel.md says of every pipeline class what its plan says."""
    page = (Path(__file__).parents[1] / "docs" / "parallel.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "Pipeline`" in line]
    said = {row[1].strip("`"): (tuple(re.findall(r"`(\w+)`", row[2])), *row[3:]) for row in rows}
    true: dict[str, Any] = {}
    for pipeline, family in FAMILIES.items():
        if isinstance(family, SplitsSequence):
            plan = family.sequence_plan
            true[pipeline] = (plan.heads, "yes", plan.ring or "yes")
        else:
            true[pipeline] = ((), "no", "no")
    assert said == true


def test_degrees_that_do_not_fit() -> None:
    sd3, krea2 = FAMILIES["StableDiffusion3Pipeline"], FAMILIES["Krea2Pipeline"]
    config = {"num_attention_heads": 24}
    check_degrees("sd3", sd3, config, ulysses=8, ring=5)
    with pytest.raises(ConfigError, match=r"ulysses = 5 does not divide the 24 heads of sd3; nearest that does: 4"):
        check_degrees("sd3", sd3, config, ulysses=5, ring=1)
    with pytest.raises(ConfigError, match=r"ring = 2: krea2 masks the padding of its text; use ring = 1 and ulysses"):
        check_degrees("krea2", krea2, config, ulysses=1, ring=2)


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
