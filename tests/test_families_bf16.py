"""A LoRA over a base in bf16, where models keep norms and time embeddings in fp32: engine and trainer still agree."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from verst.config import parse_recipe
from verst.engine.worker import Worker
from verst.errors import ConfigError
from verst.families.tiny import build_tiny
from verst.loops.batch import make_batch
from verst.loops.matrix import one_rank, sample_groups, tiny_recipe, velocity_probe

NAMES = (
    "sd3",
    "flux1",
    "flux2-klein",
    "qwen-image",
    "qwen-image-2.1",
    "krea2",
    "z-image",
    "sana",
    "wan2.1",
    "cosmos3",
    "minimax-h3",
    "cosmos-predict2.5",
)


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="verst-bf16-"))


def _checkpoint(name: str) -> None:
    """Norm weights are 1 as constructed, which bf16 holds exactly: move everything off the values that it holds."""
    folder = build_tiny(name, _folder() / name)
    for file in folder.glob("transformer*/*.safetensors"):
        generator = torch.Generator().manual_seed(0)
        tensors = {k: v + 0.01 * torch.randn(v.shape, generator=generator) for k, v in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", NAMES)
def test_engine_and_trainer_agree_in_bf16(name: str) -> None:
    _checkpoint(name)
    tables = tiny_recipe(name, "flow_grpo", "lora", folder=_folder()).model_dump(mode="json", exclude_none=True)
    tables["model"]["dtype"] = "bfloat16"
    recipe = parse_recipe(tables)
    worker = Worker(recipe.model.path, dtype=torch.bfloat16)
    with one_rank(recipe) as trainer:
        groups = sample_groups(recipe, worker)
        probe = velocity_probe(groups[0].microgroups[0], worker)
        ours, theirs = probe(worker.components.transformer), probe(trainer.transformer)
        assert all(torch.equal(ours[stream], theirs[stream]) for stream in ours)
        policy = trainer.update(make_batch(recipe, groups).shares[0]).policy
    assert policy["ratio_max_deviation"] == 0.0


@pytest.mark.parametrize("name", ["wan2.1", "krea2"])
def test_full_weights_with_modules_kept_in_fp32_are_refused(name: str) -> None:
    tables = tiny_recipe(name, "flow_grpo", "full", folder=_folder()).model_dump(mode="json", exclude_none=True)
    tables["model"]["dtype"] = "bfloat16"
    refused = pytest.raises(ConfigError, match=r"model\.dtype = bfloat16 with .*finetune lora, or dtype float32")
    with refused, one_rank(parse_recipe(tables)):
        pass
