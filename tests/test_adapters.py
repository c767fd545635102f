"""LoRA files beside a checkpoint, in PEFT and plain diffusers, and as the start of another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from run_fixtures import recipe_with, tiny_model
from safetensors.torch import load_file, save_file
from sync_processes import base_module
from torch import Tensor
from trainer_fixtures import LORA, largest_difference, one_rank, shares_of

from verst.config import missing_files
from verst.errors import ConfigError
from verst.families import recognise
from verst.trainer import checkpoint
from verst.trainer.export import export
from verst.types import Conditioning

FAMILY = recognise(tiny_model())


@torch.no_grad()
def velocity(module: torch.nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    positive = {
        "encoder_hidden_states": torch.randn(2, 24, 32, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
    }
    latents = {"visual": torch.randn(2, 4, 8, 8, generator=generator)}
    sigmas = {"visual": torch.tensor([0.9, 0.3])}
    conditioning = Conditioning(positive=positive, negative=None)
    return FAMILY.velocity(module, latents, sigmas, conditioning, guidance_scale=1.0)["visual"]


class Saved:
    """One update of a LoRA run, its checkpoint, and what the trainer computes with it."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "runs" / "run"
        self.recipe = recipe_with(folder, LORA, "trainer.lr=1e-2")
        with one_rank(self.recipe) as trainer:
            trainer.update(shares_of(self.recipe)[0])
            trainer.update(shares_of(self.recipe, rollout=1)[0])
            trainer.save(self.run / "checkpoints", 1)
            self.weights = trainer.weights()
            self.velocity = velocity(trainer.transformer)
        self.folder = checkpoint.publish(self.run / "checkpoints", 1, {"iteration": 1}, keep=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


def test_adapter_beside_the_shards_moves_plain_models_as_the_trainer(saved: Saved) -> None:
    adapter = saved.folder / "adapter"
    assert sorted(p.name for p in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)
    base = velocity(base_module(tiny_model()))
    assert float((saved.velocity - base).abs().max()) > 1e-4
    by_diffusers: Any = base_module(tiny_model())
    by_diffusers.load_lora_adapter(adapter, prefix="base_model.model", weight_name="adapter_model.safetensors")
    torch.testing.assert_close(velocity(by_diffusers), saved.velocity, rtol=0, atol=1e-6)
    by_peft = PeftModel.from_pretrained(base_module(tiny_model()), str(adapter))
    torch.testing.assert_close(velocity(by_peft.get_base_model()), saved.velocity, rtol=0, atol=1e-6)


def test_adapter_is_part_of_what_the_checkpoint_verifies(saved: Saved) -> None:
    names = json.loads((saved.folder / "manifest.json").read_text())["files"]
    assert {"adapter/adapter_model.safetensors", "adapter/adapter_config.json"} <= set(names)


@pytest.mark.parametrize("what", ["checkpoint", "adapter", "file", "export"])
def test_a_run_starts_from_an_adapter_and_trains_it(saved: Saved, tmp_path: Path, what: str) -> None:
    paths = {
        "checkpoint": saved.folder,
        "adapter": saved.folder / "adapter",
        "file": saved.folder / "adapter" / "adapter_model.safetensors",
        "export": tmp_path / "exported",
    }
    if what == "export":
        export(saved.run, saved.recipe, paths["export"], what="lora", which="newest", ema=False)
    start = f'model.finetune={{type="lora", rank=2, alpha=4.0, init="{paths[what]}"}}'
    recipe = recipe_with(tmp_path, start, "trainer.lr=1e-2")
    assert missing_files(recipe) == []
    with one_rank(recipe) as trainer:
        assert largest_difference(trainer.weights(), saved.weights) == 0.0
        assert torch.equal(velocity(trainer.transformer), saved.velocity)
        assert len(trainer.core.named) == 30
        assert all(p.requires_grad for p in trainer.core.named.values())
        trainer.update(shares_of(recipe)[0])
        moved = trainer.weights()
    assert largest_difference(moved, saved.weights) > 1e-4
    frozen = sorted(name for name, value in saved.weights.items() if torch.equal(moved[name], value))
    # The last block's text query is computed and not used.
    assert [name for name in frozen if "transformer_blocks.1.attn.add_q_proj" not in name] == []


def test_a_start_in_half_precision_keeps_the_file_in_fp32(saved: Saved, tmp_path: Path) -> None:
    start = f'model.finetune={{type="lora", rank=2, alpha=4.0, init="{saved.folder}"}}'
    with one_rank(recipe_with(tmp_path, start, "model.dtype=bfloat16")) as trainer:
        assert largest_difference(trainer.weights(), saved.weights) == 0.0


def spoiled(saved: Saved, folder: Path, change: Any) -> Path:
    shutil.copytree(saved.folder / "adapter", folder / "adapter")
    file = folder / "adapter" / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    return folder / "adapter"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {name.replace("blocks.0.attn.to_q", "blocks.0.attn.q"): value for name, value in t.items()},
            r"28 of 30 LoRA tensors .*own: transformer_blocks\.0\.attn\.q\.lora_A.*not in it: .*attn\.to_q\.lora_A",
        ),
        (lambda t: {f"unet.{name}": value for name, value in t.items()}, "0 of 30 LoRA tensors are in"),
        (lambda t: {n: v for n, v in t.items() if "to_q" not in n}, r"not in it: .*to_q.*Set model\.finetune\.targets"),
        (
            lambda t: {n: torch.cat([v, v], dim=int("lora_B" in n)) for n, v in t.items()},
            r"set model\.finetune\.rank to the file's",
        ),
        (lambda t: {n: v * float("nan") for n, v in t.items()}, "is not finite"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(saved: Saved, tmp_path: Path, change: Any, message: str) -> None:
    path = spoiled(saved, tmp_path / "spoiled", change)
    recipe = recipe_with(tmp_path, f'model.finetune={{type="lora", rank=2, alpha=4.0, init="{path}"}}')
    with pytest.raises(ConfigError, match=message), one_rank(recipe):
        pass


def test_another_alpha_is_refused_with_the_right_one(saved: Saved, tmp_path: Path) -> None:
    path = saved.folder / "adapter"
    recipe = recipe_with(tmp_path, f'model.finetune={{type="lora", rank=2, alpha=64.0, init="{path}"}}')
    message = r"trained with alpha = 4 at rank 2: set model\.finetune\.alpha = 4"
    with pytest.raises(ConfigError, match=message), one_rank(recipe):
        pass
    (tmp_path / "empty").mkdir()
    recipe = recipe_with(tmp_path, f'model.finetune={{type="lora", rank=2, alpha=4.0, init="{tmp_path}/empty"}}')
    with pytest.raises(ConfigError, match="holds no LoRA; looked for"), one_rank(recipe):
        pass
    recipe = recipe_with(tmp_path, f'model.finetune={{type="lora", rank=2, alpha=4.0, init="{tmp_path}/nowhere"}}')
    assert missing_files(recipe) == [f"model.finetune.init = '{tmp_path}/nowhere' does not exist"]
