"""Each algorithm in the real trainer: old policies, masks, experts, few steps, and the recipes of the glyph model."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import recipe_with
from trainer_fixtures import LORA, Shares, gradients, groups_of, largest_difference, one_rank, shares_of

from verst.config import load_recipe, parse_recipe
from verst.config.recipe import RlRecipe
from verst.engine.worker import Worker
from verst.errors import ConfigError
from verst.loops.batch import make_batch
from verst.loops.matrix import ALGORITHMS, run_recipe, sample_groups, tiny_recipe

ROOT = Path(__file__).parents[1]
RECORDED = ("flow_grpo", "grpo_guard")
NOISED = ("nft", "awm", "dpo", "online_sft")
NO_STEPS = 'sampling.steps={type="none"}'
OWN_NOISE = "sampling.shared_initial_noise=false"
FREE = ("trainer.grad_clip=1e9", "trainer.lr=0.0")


def overrides(algorithm: str, **keys: Any) -> tuple[str, ...]:
    """A section of this algorithm with a reference that any weights have, and the sampling that it needs."""
    given = {"timestep_fraction": 1.0} | keys if algorithm in NOISED else keys
    table = ", ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in given.items())
    section = f'algorithm={{type="{algorithm}", reference={{type="frozen"}}{", " if table else ""}{table}}}'
    return (section, NO_STEPS, OWN_NOISE) if algorithm in NOISED else (section,)


@pytest.mark.parametrize("algorithm", RECORDED)
def test_recomputed_log_probs_are_the_rollouts_in_its_geometry(tmp_path: Path, algorithm: str) -> None:
    """Several optimizer steps: the denominator is what the weights gave that sampled, not what they have become."""
    ends = []
    for kind in ("rollout", "recompute"):
        recipe = recipe_with(tmp_path, *overrides(algorithm, old_log_probs=kind), "trainer.steps_per_rollout=2")
        (share,) = shares_of(recipe)
        with one_rank(recipe) as trainer:
            start = trainer.weights()
            assert trainer.update(share).policy["ratio_max_deviation"] == 0.0
            ends.append(trainer.weights())
    assert largest_difference(*ends) == 0.0
    assert largest_difference(start, ends[0]) > 1e-4


@pytest.mark.parametrize("tile", [1, 4])
def test_recomputed_log_probs_make_the_ratio_one_in_any_geometry(tmp_path: Path, tile: int) -> None:
    recipe = recipe_with(tmp_path, *overrides("flow_grpo", old_log_probs="recompute"), f"trainer.tile_size={tile}")
    with one_rank(recipe) as trainer:
        assert trainer.update(shares_of(recipe)[0]).policy["ratio_max_deviation"] == 0.0


def test_the_guard_compares_with_the_means_before_the_first_step(tmp_path: Path) -> None:
    """One update of two steps is not two updates of one: the second step's old means are the rollout's."""
    recipe = recipe_with(tmp_path, *overrides("grpo_guard", clip_low=0.5, clip_high=0.5), "trainer.steps_per_rollout=2")
    (share,) = shares_of(recipe)
    ends = []
    for parts in ([share], [share[:1], share[1:]]):
        with one_rank(recipe) as trainer:
            for part in parts:
                trainer.update(part)
            ends.append(trainer.weights())
    assert largest_difference(*ends) > 1e-7


def with_masked_last_sample(share: Shares, *, garbage: bool) -> Shares:
    def masked(block: Any) -> Any:
        mask = block.mask.clone()
        mask[-1] = False
        latents = {name: value.clone() for name, value in block.latents.items()}
        if garbage:
            for value in latents.values():
                value[:, -1] += 3.0
        return replace(block, mask=mask, latents=latents)

    return [[masked(block) for block in blocks] for blocks in share]


@pytest.mark.parametrize("algorithm", ["flow_grpo", "grpo_guard", "nft", "awm"])
def test_what_stands_in_a_masked_place_changes_no_gradient(tmp_path: Path, algorithm: str) -> None:
    recipe = recipe_with(tmp_path, *overrides(algorithm, kl_beta=0.1), *FREE)
    (share,) = shares_of(recipe)
    with one_rank(recipe) as trainer:
        found = []
        for garbage in (False, True):
            assert trainer.update(with_masked_last_sample(share, garbage=garbage)).grad_norm > 1e-5
            found.append(gradients(trainer))
    assert largest_difference(*found) <= 1e-7


@pytest.mark.parametrize("algorithm", ["dpo", "online_sft"])
def test_masked_samples_enter_no_pair(tmp_path: Path, algorithm: str) -> None:
    """The sample that would be the best has no finite reward."""
    recipe = recipe_with(tmp_path, *overrides(algorithm))

    def score(key: Any) -> float:
        return float("nan") if key.index == 3 else float(key.index)

    groups = groups_of(recipe, score=score)
    batch = make_batch(recipe, groups)
    held = [x0 for blocks in batch.shares[0] for block in blocks for x0 in block.next_latents["visual"][0]]
    assert held
    for group in groups:
        masked = group.samples[3].streams["visual"].latents[-1].float()
        assert not any(torch.equal(x0, masked) for x0 in held)


@pytest.mark.parametrize("algorithm", [*RECORDED, *NOISED])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_few_step_models_train(tmp_path: Path, algorithm: str, num_steps: int) -> None:
    """Distilled models sample in one to four steps: the first starts at pure noise, and the last is trained too."""
    keys = {"timestep_fraction": 0.3} if algorithm in NOISED else {}
    steps = () if algorithm in NOISED else ('sampling.steps={type="all"}',)
    more = ("trainer.steps_per_rollout=2", f"sampling.num_steps={num_steps}")
    recipe = recipe_with(tmp_path, *overrides(algorithm, **keys), *steps, *more)
    (share,) = shares_of(recipe)
    with one_rank(recipe) as trainer:
        metrics = trainer.update(share)
    assert metrics.num_steps == 2
    assert metrics.grad_norm > 1e-4


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="verst-algorithms-"))


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "sft"])
def test_both_experts_are_trained(algorithm: str) -> None:
    tables = tiny_recipe("wan2.2-a14b", algorithm, "full", folder=folder()).model_dump(mode="json", exclude_none=True)
    tables["trainer"]["grad_clip"] = 1e9
    if algorithm in NOISED:
        tables["algorithm"]["timestep_fraction"] = 1.0
    else:
        tables["sampling"]["steps"] = {"type": "all"}
    recipe = parse_recipe(tables)
    assert isinstance(recipe, RlRecipe)
    found = []
    with one_rank(recipe) as trainer:
        (share,) = make_batch(recipe, sample_groups(recipe, Worker(recipe.model.path))).shares
        found.append((trainer.update(share), gradients(trainer)))
    # The same pairs in tiles that hold rows of both experts.
    tables["trainer"] |= {"tile_size": 8}
    with one_rank(parse_recipe(tables)) as trainer:
        found.append((trainer.update(share), gradients(trainer)))
    (metrics, apart), (again, together) = found
    assert {name.split(".")[1] for name, grad in apart.items() if float(grad.abs().max()) > 0} == {
        "transformer",
        "transformer_2",
    }
    assert metrics.loss == pytest.approx(again.loss, rel=1e-4, abs=1e-6)
    assert largest_difference(apart, together) <= 1e-3 * max(float(grad.abs().max()) for grad in apart.values())


SUPERVISED = {"glyphs_sft", "glyphs_sft_folder", "glyphs_dpo_offline"}
GLYPHS = sorted({path.stem for path in (ROOT / "recipes").glob("glyphs_*.toml")} - SUPERVISED)


@pytest.mark.parametrize("finetune", ['model.finetune={type="full"}', LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", GLYPHS)
def test_a_step_of_every_glyph_recipe(tmp_path: Path, name: str, finetune: str) -> None:
    """The real checkpoint by from_pretrained: one rollout, one update, one certified sync."""
    recipe = load_recipe(
        ROOT / "recipes" / f"{name}.toml",
        [
            f"model.path={ROOT / 'checkpoints' / 'glyphs'}",
            f"prompts.train={ROOT / 'data' / 'glyphs' / 'train.txt'}",
            f"prompts.heldout={ROOT / 'data' / 'glyphs' / 'heldout.txt'}",
            'rewards=[{type="brightness"}]',
            "rollout.num_groups=1",
            "rollout.group_size=4",
            "rollout.microgroup_size=4",
            "trainer.tile_size=4",
            "trainer.steps_per_rollout=1",
            "trainer.lr=1e-3",
            "run.device=cpu",
            finetune,
        ],
    )
    assert isinstance(recipe, RlRecipe)
    cell = run_recipe(recipe, name=name, algorithm=recipe.algorithm.type)
    assert cell.ratio_max_deviation == (0.0 if recipe.algorithm.needs_stochastic_steps else None)
    assert cell.changed > 0
    assert cell.agreement == 0.0


@pytest.mark.parametrize(
    ("algorithm", "more", "message"),
    [
        ("dpo", ("trainer.tile_size=3",), "compares samples 2 by 2 in one forward, so it must be a multiple of 2"),
        ("dpo", ("trainer.tile_size=1",), "must be a multiple of 2"),
        ("dpo", ('algorithm={type="dpo"}',), "adapter_off needs model.finetune.type = lora"),
        ("dpo", ('algorithm={type="dpo", reference={type="ema"}}',), "ema needs trainer.ema_decay"),
        ("awm", ('sampling.steps={type="all"}',), "AWM trains on clean samples of a deterministic sampler; use none"),
        ("nft", ("sampling.shared_initial_noise=true",), "would be the same picture, and NFT compares them; use false"),
        ("online_sft", ("sampling.guidance_scale=4.5",), "online SFT samples and trains without guidance"),
        ("grpo_guard", (NO_STEPS,), "so GRPO-Guard has nothing to train"),
        ("grpo_guard", ('sampling.transition={type="sde", eta=0.0}',), "so GRPO-Guard has nothing to train"),
    ],
)
def test_what_an_algorithm_cannot_do_is_refused(
    tmp_path: Path, algorithm: str, more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_with(tmp_path, *overrides(algorithm), *more)
