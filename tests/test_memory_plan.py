"""Bytes told from shapes against bytes of real tensors, and what a plan makes of them."""

from __future__ import annotations

import functools
import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_fixtures import tiny_folder, velocity_case
from rich.console import Console
from run_fixtures import recipe_with
from torch import nn
from trainer_fixtures import LORA, one_rank

from verst.cli.plan import print_memory
from verst.config import parse_recipe
from verst.config.sections import ParallelConfig
from verst.errors import ConfigError, ModelError
from verst.families import ALL_PARTS, recognise
from verst.families.skeleton import Skeletons
from verst.loops.matrix import tiny_recipe
from verst.loops.memory_plan import memory_plan
from verst.trainer.estimate import peak_of
from verst.trainer.footprint import TileBytes, trace_tile
from verst.trainer.live_bytes import LiveBytes, fused_attention
from verst.trainer.recompute import recompute_blocks
from verst.weights.lora import LoraSpec, adaptable, attach_lora

FAMILIES = ("cosmos-predict2.5", "flux1", "qwen-image", "sana", "sd3.5", "wan2.2-a14b")


def test_live_bytes_follow_tensors() -> None:
    with LiveBytes(granule=512) as live:
        one = torch.empty(1000)
        view = one[:10]
        del one
        assert live.now == live.peak == 4096
        two = view * 2
        assert live.now == 4096 + 512
        del view
        assert live.now == 512
        del two
    assert (live.now, live.peak) == (0, 4096 + 512)


def traced(name: str, *, shapes_only: bool, every: int | None, lora: bool) -> TileBytes:
    case, folder = velocity_case(name), tiny_folder(name)
    family, skeletons = recognise(folder), Skeletons()
    if shapes_only:
        parts = skeletons.load(family, folder, parts=("transformer",), dtype=torch.float32)
    else:
        parts = family.load(folder, parts=("transformer",), dtype=torch.float32, device=torch.device("cpu"))
    module = parts.transformer
    if lora:
        with torch.device("meta") if shapes_only else nullcontext():
            attach_lora(module, LoraSpec(rank=2, alpha=4.0, targets=family.lora_targets))
        skeletons.fill(module, dtype=torch.float32)
    else:
        module.requires_grad_(True)
    if every is not None:
        for model in adaptable(module):
            recompute_blocks(model, family.fsdp_blocks, every=every)
    velocity = functools.partial(
        family.velocity,
        module,
        case["latents"],
        case["sigmas"],
        case["conditioning"],
        guidance_scale=case["guidance_scale"],
    )
    trained = [p for p in module.parameters() if p.requires_grad]
    return trace_tile(velocity, trained, skeletons=skeletons if shapes_only else None, granule=1)


@pytest.mark.parametrize(("lora", "every"), [(False, None), (False, 1), (True, 2)])
@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_tell_what_a_real_backward_keeps(name: str, lora: bool, every: int | None) -> None:
    told = traced(name, shapes_only=True, every=every, lora=lora)
    real = traced(name, shapes_only=False, every=every, lora=lora)
    assert told.saved == pytest.approx(real.saved, rel=0.01)
    # Inputs stand twice for a moment, as themselves and as shapes.
    assert 0.99 * real.peak <= told.peak <= 1.1 * real.peak
    assert real.peak > real.saved > 0


def test_attention_of_a_gpu_keeps_one_number_a_query() -> None:
    query, key, value = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    with fused_attention(), LiveBytes(granule=1) as live:
        out = F.scaled_dot_product_attention(query, key, value)
        assert live.now == out.numel() * 4 + 2 * 3 * 5 * 4
    assert out.shape == query.shape


def test_the_items_of_a_rank(tmp_path: Path) -> None:
    """Against the numbers of elements that a real trainer has."""
    overrides = ("trainer.ema_decay=0.9", "algorithm.kl_beta=0.5", 'algorithm.reference={type="frozen"}')
    recipe = recipe_with(tmp_path, *overrides, 'model.dtype="bfloat16"')
    with one_rank(recipe) as trainer:
        count = sum(p.numel() for p in trainer.transformer.parameters())
        frozen = trainer._policies._reference
        assert frozen is not None
    items = {item.name: item for item in memory_plan(recipe).trainer}
    assert items["weights"].bytes == count * 4
    assert items["optimizer state"].bytes == count * 8
    assert items["moving average"].bytes == count * 4
    assert items["frozen reference"].bytes == count * 2
    assert not any(item.host for item in items.values())
    away = recipe_with(
        tmp_path, *overrides, 'model.dtype="bfloat16"', "trainer.offload={optimizer=true, reference=true}"
    )
    moved = {item.name for item in memory_plan(away).trainer if item.host}
    assert moved == {"optimizer state", "moving average", "frozen reference"}


def test_checkpointing_and_a_lora_take_less(tmp_path: Path) -> None:
    plain = memory_plan(recipe_with(tmp_path)).trainer
    less = memory_plan(recipe_with(tmp_path, 'trainer.activation_checkpointing="full"')).trainer
    lora = {item.name: item.bytes for item in memory_plan(recipe_with(tmp_path, LORA, "algorithm.kl_beta=0.5")).trainer}
    assert peak_of(less) < peak_of(plain)
    assert "frozen reference" not in lora
    assert lora["optimizer state"] < {item.name: item.bytes for item in plain}["optimizer state"] / 10


def test_a_supervised_run_holds_what_its_modules_hold(tmp_path: Path) -> None:
    tiny = tiny_recipe("sd3", "flow_grpo", "lora", folder=tmp_path)
    tables: dict[str, Any] = {
        "run": {"name": "x", "iterations": 1},
        "model": {"path": str(tiny.model.path), "max_sequence_length": 8, "dtype": "bfloat16"},
        "sampling": {"height": 32, "width": 32, "num_steps": 2},
        "data": {"type": "folder", "path": "none", "heldout": 1},
        "algorithm": {"type": "sft", "batch_size": 4},
        "trainer": {"tile_size": 2, "lr": 1e-3, "ema_decay": 0.9},
    }

    def items(**changes: dict[str, Any]) -> dict[str, Any]:
        merged = {**tables, **{key: {**tables.get(key, {}), **value} for key, value in changes.items()}}
        plan = memory_plan(parse_recipe(merged))
        assert plan.engine == []
        return {item.name: item.bytes for item in plan.trainer}

    family = recognise(tiny.model.path)
    parts = family.load(tiny.model.path, parts=ALL_PARTS, dtype=torch.bfloat16, device=torch.device("cpu"))
    count = sum(p.numel() for p in parts.transformer.parameters())
    full = items(model={"finetune": {"type": "full"}})
    # Masters in fp32, and what autocast makes of them.
    assert (full["weights"], full["weights in model.dtype"]) == (count * 4, count * 2)
    assert (full["optimizer state"], full["moving average"], full["gradients, whole"]) == (
        count * 8,
        count * 4,
        count * 4,
    )
    assert not {"gathered weights", "gradients of one block"} & set(full)
    others = [m for name, m in parts.modules.items() if isinstance(m, nn.Module) and name != "transformer"]
    real = sum(x.numel() * x.element_size() for m in others for x in [*m.parameters(), *m.buffers()])
    assert full["text encoders and autoencoder"] == pytest.approx(real, rel=0.01)
    lora = items(model={"finetune": {"type": "lora", "rank": 2, "alpha": 4.0}})
    assert lora["optimizer state"] < full["optimizer state"] / 5
    larger = items(model={"finetune": {"type": "full"}}, data={"buckets": {"sizes": [[32, 32], [64, 64]]}})
    assert larger["activations"] > full["activations"]
    with pytest.raises(ConfigError, match=r"trainer\.train_text_encoders = true: --memory cannot tell"):
        items(trainer={"train_text_encoders": True}, model={"dtype": "float32"})


def test_the_plan_is_printed(tmp_path: Path) -> None:
    out = io.StringIO()
    print_memory(memory_plan(recipe_with(tmp_path)), Console(file=out, width=120))
    text = out.getvalue()
    for words in ("memory of a trainer rank, GiB", "activations", "memory of an engine, GiB", "most at a time"):
        assert words in text


def test_layers_that_are_cut_over_ranks_are_refused(tmp_path: Path) -> None:
    recipe = tiny_recipe("sd3", "flow_grpo", "lora", folder=tmp_path)
    trainer = recipe.trainer.model_copy(update={"parallel": ParallelConfig(tensor=2), "ranks": 2})
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.tensor = 2: --memory cannot tell"):
        memory_plan(recipe.model_copy(update={"trainer": trainer}))


def test_a_family_whose_shapes_hang_on_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"hunyuan_video_15 computes shapes from values"):
        memory_plan(tiny_recipe("hunyuanvideo1.5", "flow_grpo", "lora", folder=tmp_path))
    recipe: Any = tiny_recipe("qwen-image-edit", "flow_grpo", "lora", folder=tmp_path)
    with pytest.raises(ModelError, match=r"qwen_image_edit takes condition images"):
        memory_plan(recipe)
