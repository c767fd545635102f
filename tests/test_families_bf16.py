"""A LoRA over a base in bf16, where models keep norms and time embeddings in fp32: engine and trainer still agree,
and so does an engine that borrows the base."""

from __future__ import annotations

import copy
import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verst.config import RlRecipe, parse_recipe
from verst.config import sections as s
from verst.engine.worker import Worker
from verst.errors import ConfigError, ModelError
from verst.families import FAMILIES, recognise
from verst.families.islands import is_island
from verst.families.tiny import build_tiny
from verst.loops.batch import make_batch
from verst.loops.forward import keep_islands_in_fp32, velocity
from verst.loops.local_engine import sync_in_process
from verst.loops.matrix import one_rank, sample_groups, tiny_recipe, velocity_probe
from verst.trainer import checkpoint
from verst.types import Conditioning
from verst.weights.loan import Borrower, Lender

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


def _recipe(name: str, finetune: str, **model: Any) -> RlRecipe:
    tables = tiny_recipe(name, "flow_grpo", finetune, folder=_folder()).model_dump(mode="json", exclude_none=True)
    tables["model"] |= {"dtype": "bfloat16", **model}
    recipe = parse_recipe(tables)
    assert isinstance(recipe, RlRecipe)
    return recipe


def _worker(recipe: RlRecipe) -> Worker:
    return Worker(recipe.model.path, dtype=torch.bfloat16, fp32_modules=recipe.model.fp32_modules)


def load_masters(recipe: RlRecipe) -> dict[str, Tensor]:
    family = recognise(recipe.model.path)
    loaded = family.load(recipe.model.path, parts=("transformer",), dtype=torch.float32, device=torch.device("cpu"))
    return dict(loaded.transformer.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_engine_and_trainer_agree_in_bf16(name: str) -> None:
    _checkpoint(name)
    recipe = _recipe(name, "lora")
    worker = _worker(recipe)
    with one_rank(recipe) as trainer:
        groups = sample_groups(recipe, worker)
        probe = velocity_probe(groups[0].microgroups[0], worker)
        ours, theirs = probe(worker.components.transformer), probe(trainer.transformer)
        assert all(torch.equal(ours[stream], theirs[stream]) for stream in ours)
        policy = trainer.update(make_batch(recipe, groups).shares[0]).policy
    assert policy["ratio_max_deviation"] == 0.0
    lender = Lender(worker.components.transformer, device=torch.device("cpu"))
    meta = torch.device("meta")
    empty = worker.family.load(recipe.model.path, parts=("transformer",), dtype=torch.bfloat16, device=meta).transformer
    Borrower(lender.loan, device=torch.device("cpu")).place(empty)
    borrowed = probe(empty)
    assert all(torch.equal(ours[stream], borrowed[stream]) for stream in ours)


@pytest.mark.parametrize("name", ["sd3", "wan2.1", "krea2", "cosmos3", "minimax-h3"])
def test_all_weights_train_in_bf16_beside_islands_in_fp32(name: str, tmp_path: Path) -> None:
    """The ratio before the update is 1; what the update made arrives in the engine in each tensor's own dtype."""
    _checkpoint(name)
    recipe = _recipe(name, "full", **({"fp32_modules": ["norm_out"]} if name == "sd3" else {}))
    algorithm = {"kl_beta": 0.5, "reference": s.FrozenReference()}
    recipe = recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update=algorithm)})
    worker = _worker(recipe)
    islands = worker.family.fp32_modules
    held = {key: p.dtype for key, p in worker.components.transformer.named_parameters()}
    assert {key for key, dtype in held.items() if dtype == torch.float32} == {k for k in held if is_island(k, islands)}
    with one_rank(recipe) as trainer:
        groups = sample_groups(recipe, worker)
        policy = trainer.update(make_batch(recipe, groups).shares[0]).policy
        assert policy["ratio_max_deviation"] == policy["kl"] == 0.0
        sync_in_process(trainer, worker, version=1)
        trained = trainer.weights()
        for key, p in worker.components.transformer.named_parameters():
            assert torch.equal(p, trained[f"transformer.{key}"].to(held[key])), key
        probe = velocity_probe(groups[0].microgroups[0], worker)
        ours, theirs = probe(worker.components.transformer), probe(trainer.transformer)
        assert all(torch.equal(ours[stream], theirs[stream]) for stream in ours)
        trainer.save(tmp_path, 1)
        folder = checkpoint.publish(tmp_path, 1, {}, keep=1)
    with one_rank(recipe) as trainer:
        trainer.load(folder)
        resumed = trainer.weights()
    assert all(torch.equal(resumed[key], value) for key, value in trained.items())
    moved = [key for key, p in load_masters(recipe).items() if not torch.equal(p, trained[f"transformer.{key}"])]
    assert any(is_island(key, islands) for key in moved), "no island was trained"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"fp32_modules": ["normout"]}, r"model\.fp32_modules: 'normout' is no module of SD3.*norm_out"),
        ({"fp32_modules": ["transformer_blocks"]}, r"'transformer_blocks' is a list of modules"),
        ({"fp32_modules": ["norm_out.linear"]}, r"model\.fp32_modules names 'norm_out\.linear'.*'linear'"),
        ({"fp32_modules": ["norm_out"], "dtype": "float32"}, r"fp32_modules .* with model\.dtype = .float32."),
    ],
)
def test_islands_that_cannot_be_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        _worker(_recipe("sd3", "full", **model))


def test_frozen_copies_compute_their_own_islands() -> None:
    """SFT keeps all in fp32 and computes by autocast, islands outside of it."""
    _checkpoint("wan2.1")
    components = recognise(_folder() / "wan2.1").load(
        _folder() / "wan2.1", parts=("transformer",), dtype=torch.float32, device=torch.device("cpu")
    )
    live = components.transformer
    keep_islands_in_fp32(live, components)
    seen: list[torch.dtype] = []
    live.condition_embedder.time_embedder.linear_1.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    frozen = copy.deepcopy(live)
    generator = torch.Generator().manual_seed(0)
    x = {"visual": torch.randn(1, live.config.in_channels, 2, 4, 4, generator=generator)}
    text = {"encoder_hidden_states": torch.randn(1, 8, live.config.text_dim, generator=generator)}

    def run(module: nn.Module) -> Tensor:
        conditioning = Conditioning(positive=text, negative=None, geometry=None)
        with torch.no_grad():
            sigma = {"visual": torch.tensor([0.5])}
            return velocity(components, module, x, sigma, conditioning, guidance_scale=1.0, dtype=torch.bfloat16)[
                "visual"
            ]

    before = run(frozen)
    with torch.no_grad():
        live.condition_embedder.time_embedder.linear_1.weight.zero_()
    assert torch.equal(run(frozen), before)
    assert not torch.equal(run(live), before)
    assert set(seen) == {torch.float32}


def test_docs_name_the_islands_of_every_family() -> None:
    rows = (
        (Path(__file__).parents[1] / "docs/precision.md")
        .read_text()
        .split("## Islands")[1]
        .split("## ")[0]
        .splitlines()
    )
    cells = [row.strip("|").split("|") for row in rows if row.startswith("| `")]
    told = {name: re.findall("`(.*?)`", what) for names, what in cells for name in re.findall("`(.*?)`", names)}
    assert told == {family.name: list(family.fp32_modules) for family in FAMILIES.values() if family.fp32_modules}
