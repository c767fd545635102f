"""The trainer's exactness: ratio 1 against the real engine, the gradient of the plain mean, the KL and its reference."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_fixtures import WORDS, recipe_with, tiny_model
from torch import Tensor, nn
from trainer_fixtures import LORA, Shares, gradients, groups_of, largest_difference, one_rank, shares_of

from verst.algorithms.pairs import PairBlock, tiles_of
from verst.config.recipe import RlRecipe
from verst.engine.worker import Worker
from verst.families import recognise
from verst.loops.batch import make_batch
from verst.trainer.rl import RlTrainer
from verst.types import SampleKey

NO_CLIP = "trainer.grad_clip=1e9"
FROZEN = "trainer.lr=0.0"
FAMILY = recognise(tiny_model())


@pytest.mark.parametrize("transition", ['{type="sde", eta=0.7}', '{type="cps", eta=0.8}', '{type="dance", eta=0.3}'])
@pytest.mark.parametrize("guidance", ["1.0", "3.5"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16"])
def test_ratio_is_exactly_one_in_the_engines_geometry(
    tmp_path: Path, transition: str, guidance: str, storage: str
) -> None:
    recipe = recipe_with(
        tmp_path,
        f"sampling.transition={transition}",
        f"sampling.guidance_scale={guidance}",
        f"sampling.storage_dtype={storage}",
    )
    shares = shares_of(recipe)
    assert all(block.latents["visual"].dtype == getattr(torch, storage) for block in shares[0][0])
    with one_rank(recipe) as trainer:
        metrics = trainer.update(shares[0])
    assert metrics.policy["ratio_max_deviation"] == 0.0
    assert metrics.policy["log_prob_max_difference"] == 0.0
    assert metrics.policy["clip_fraction"] == 0.0
    assert metrics.grad_norm > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ratio_is_exactly_one_in_half_precision(tmp_path: Path, dtype: str) -> None:
    recipe = recipe_with(tmp_path, f"model.dtype={dtype}", f"sampling.storage_dtype={dtype}", LORA)
    with one_rank(recipe) as trainer:
        metrics = trainer.update(shares_of(recipe)[0])
    assert metrics.policy["ratio_max_deviation"] == 0.0
    assert metrics.policy["log_prob_max_difference"] == 0.0
    assert metrics.grad_norm > 1e-4


@pytest.mark.parametrize("tile", [1, 4])
@pytest.mark.parametrize("guidance", ["1.0", "3.5"])
def test_ratio_is_one_to_rounding_in_another_geometry(tmp_path: Path, tile: int, guidance: str) -> None:
    recipe = recipe_with(tmp_path, f"trainer.tile_size={tile}", f"sampling.guidance_scale={guidance}")
    assert recipe.rollout.microgroup_size == 2
    with one_rank(recipe) as trainer:
        metrics = trainer.update(shares_of(recipe)[0])
    assert metrics.policy["ratio_max_deviation"] <= 1e-6
    assert metrics.policy["log_prob_max_difference"] <= 1e-6


def mixed_recipe(folder: Path, *overrides: str) -> RlRecipe:
    """Four groups of rows of unlike size and number of steps, next to each other."""
    rows = [{}, {"width": 32}, {}, {"width": 32, "num_steps": 3}]
    texts = [json.dumps({"prompt": word, **row}) for word, row in zip(WORDS, rows, strict=False)]
    (folder / "mixed.jsonl").write_text("\n".join(texts))
    mixed = (f"prompts.train={folder / 'mixed.jsonl'}", "prompts.shuffle=false", "rollout.num_groups=4")
    return recipe_with(folder, *mixed, *overrides)


def test_rows_of_unlike_geometry_train_together_and_share_no_tile(tmp_path: Path) -> None:
    recipe = mixed_recipe(tmp_path, "sampling.guidance_scale=3.5")
    shares = shares_of(recipe)
    with one_rank(recipe) as trainer:
        metrics = trainer.update(shares[0])
        whole = gradients(trainer)
    assert (metrics.policy["ratio_max_deviation"], metrics.policy["log_prob_max_difference"]) == (0.0, 0.0)

    wide = mixed_recipe(tmp_path, "sampling.guidance_scale=3.5", "trainer.tile_size=8")
    tiles = tiles_of(shares[0][0], tile_size=8, device=torch.device("cpu"))
    # Two groups of 64 x 64, then one each of width 32 with 4 and with 3 steps: 2 steps of 4 samples a group.
    assert [len(tile.weight) for tile in tiles] == [8, 8, 8, 8]
    assert [tile.latents["visual"].shape[-1] for tile in tiles] == [8, 8, 4, 4]
    assert float(tiles[2].first_sigmas["visual"]) != float(tiles[3].first_sigmas["visual"])
    with one_rank(wide) as trainer:
        metrics = trainer.update(shares[0])
        assert largest_difference(gradients(trainer), whole) <= 1e-5
    assert metrics.policy["ratio_max_deviation"] <= 1e-6


@pytest.mark.parametrize("finetune", ['model.finetune={type="full"}', LORA])
def test_ratio_stays_one_through_updates_and_syncs(tmp_path: Path, finetune: str) -> None:
    recipe = recipe_with(tmp_path, finetune)
    worker = Worker(tiny_model())
    with one_rank(recipe) as trainer:
        for version in range(3):
            manifest = trainer.publish(version)
            assert manifest is not None
            worker.update_from_manifest(manifest)
            trainer.unpublish()
            groups = groups_of(recipe, rollout=version, worker=worker)
            assert {s.weight_version for group in groups for s in group.samples} == {version}
            before = trainer.weights()
            metrics = trainer.update(make_batch(recipe, groups).shares[0])
            assert (metrics.policy["ratio_max_deviation"], metrics.policy["log_prob_max_difference"]) == (0.0, 0.0)
            assert largest_difference(before, trainer.weights()) > 1e-4


def plain_transformer() -> nn.Module:
    """The model as it is on disk, without FSDP."""
    parts = FAMILY.load(tiny_model(), parts=("transformer",), dtype=torch.float32, device=torch.device("cpu"))
    return parts.transformer.requires_grad_(True)


def sde_mean_and_std(module: nn.Module, block: PairBlock, step: int, *, eta: float = 0.7) -> tuple[Tensor, Tensor]:
    """Flow-GRPO's eq. 9 written out once more, for a block's step."""
    x = block.latents["visual"][step].float()
    sigma, following = block.sigmas["visual"][step], block.next_sigmas["visual"][step]
    rows = {"visual": sigma.expand(len(x))}
    v = FAMILY.velocity(module, {"visual": x}, rows, block.conditioning, guidance_scale=1.0)["visual"]
    dt = following - sigma
    denominator = 1 - (block.first_sigmas["visual"] if sigma == 1 else sigma)
    variance = eta**2 * sigma / denominator
    mean = x + (v + variance / (2 * sigma) * (x + (1 - sigma) * v)) * dt
    return mean, torch.sqrt(-variance * dt)


def test_accumulation_over_tiles_is_the_gradient_of_the_plain_mean(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, NO_CLIP, FROZEN)
    (blocks,) = shares_of(recipe)[0]
    with one_rank(recipe) as trainer:
        trainer.update([blocks])
        got = gradients(trainer)
    module, losses = plain_transformer(), []
    for block in blocks:
        for step in range(block.num_steps):
            mean, std = sde_mean_and_std(module, block, step)
            log_prob = torch.distributions.Normal(mean, std).log_prob(block.next_latents["visual"][step])
            per_sample = log_prob.flatten(1).mean(dim=1)
            losses += list(-block.advantages * torch.exp(per_sample - per_sample.detach()))
    assert len(losses) == 2 * 4 * 2  # groups x samples x steps
    torch.stack(losses).mean().backward()
    expected = {f"transformer.{n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    size = max(float(grad.abs().max()) for grad in expected.values())
    assert size > 1e-3
    assert largest_difference(got, expected) < 1e-5 * size


def test_masked_samples_give_no_gradient(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, NO_CLIP, FROZEN)
    (blocks,) = shares_of(recipe)[0]
    mask = torch.tensor([True, False])
    masked = [replace(block, mask=mask) for block in blocks]

    def other(block: PairBlock) -> PairBlock:
        """Another picture and a huge advantage in the masked place."""
        latents = block.latents["visual"].clone()
        latents[:, 1] += 1.0
        advantages = torch.where(mask, block.advantages, torch.tensor(1e6))
        return replace(block, latents={"visual": latents}, advantages=advantages)

    alone = [
        replace(block, advantages=torch.where(mask, block.advantages, torch.tensor(0.0)), mask=mask) for block in blocks
    ]
    with one_rank(recipe) as trainer:
        results = []
        for case in (masked, [other(block) for block in masked], alone):
            metrics = trainer.update([case])
            results.append((gradients(trainer), metrics))
    (first, metrics), *others = results
    assert metrics.grad_norm > 1e-3
    for grads, again in others:
        assert largest_difference(first, grads) == 0.0
        assert again.loss == metrics.loss
        assert again.policy["ratio_max_deviation"] == 0.0


def test_mean_is_over_the_pairs_that_count(tmp_path: Path) -> None:
    """Masking the samples without an advantage doubles the rest's share."""
    recipe = recipe_with(tmp_path, NO_CLIP, FROZEN)
    (blocks,) = shares_of(recipe)[0]
    half = [replace(b, advantages=torch.tensor([float(b.advantages[0]), 0.0])) for b in blocks]
    with one_rank(recipe) as trainer:
        trainer.update([half])
        whole = gradients(trainer)
        trainer.update([[replace(block, mask=torch.tensor([True, False])) for block in half]])
        counted = gradients(trainer)
    assert largest_difference({n: 2 * g for n, g in whole.items()}, counted) < 1e-6


STILL = "trainer.ema_decay=0.9999999"
"""The average moves with every step taken, which finite differences must not notice."""
REFERENCES = {
    "adapter_off": (LORA, 'algorithm.reference={type="adapter_off"}'),
    "frozen": ('algorithm.reference={type="frozen"}',),
    "frozen_lora": (LORA, 'algorithm.reference={type="frozen"}'),
    "ema": ('algorithm.reference={type="ema"}', STILL),
    "ema_lora": (LORA, 'algorithm.reference={type="ema"}', STILL),
}


@torch.no_grad()
def move(trainer: RlTrainer, direction: dict[str, Tensor], by: float) -> None:
    for name, p in trainer.core.named.items():
        p.to_local().add_(direction[name], alpha=by)  # type: ignore[attr-defined]


def random_direction(trainer: RlTrainer) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(p.shape, generator=generator) for name, p in trainer.core.named.items()}


def kl_recipe(folder: Path, *overrides: str) -> RlRecipe:
    return recipe_with(folder, "algorithm.kl_beta=0.5", NO_CLIP, FROZEN, *overrides)


def without_advantages(shares: Shares) -> Shares:
    return [[replace(b, advantages=torch.zeros_like(b.advantages)) for b in blocks] for blocks in shares]


@pytest.mark.parametrize("kind", REFERENCES)
def test_kl_alone_has_the_gradient_of_finite_differences(tmp_path: Path, kind: str) -> None:
    recipe = kl_recipe(tmp_path, *REFERENCES[kind])
    shares = without_advantages(shares_of(recipe)[0])
    with one_rank(recipe) as trainer:
        # On the reference itself the KL is 0, and so is its gradient.
        assert trainer.update(shares).policy["kl"] == pytest.approx(0.0, abs=1e-10)
        move(trainer, random_direction(trainer), 0.3 if LORA in REFERENCES[kind] else 0.02)
        metrics = trainer.update(shares)
        grads = gradients(trainer)
        assert metrics.loss == pytest.approx(0.5 * metrics.policy["kl"], rel=1e-5)
        assert metrics.grad_norm > 1e-4
        direction = {name: grad / metrics.grad_norm for name, grad in grads.items()}

        def loss_at(distance: float) -> float:
            move(trainer, direction, distance)
            value = trainer.update(shares).loss
            move(trainer, direction, -distance)
            return value

        h = 0.02 * metrics.loss / metrics.grad_norm
        near, far = ((loss_at(d) - loss_at(-d)) / (2 * d) for d in (h, 2 * h))
    assert (4 * near - far) / 3 == pytest.approx(metrics.grad_norm, rel=1e-3)


@pytest.mark.parametrize("kind", ["frozen", "ema"])
@pytest.mark.parametrize("form", ["transition", "no_dt"])
def test_kl_is_to_the_reference_weights_and_no_others(tmp_path: Path, kind: str, form: str) -> None:
    recipe = kl_recipe(tmp_path, *REFERENCES[kind], f"algorithm.kl_form={form}")
    shares = without_advantages(shares_of(recipe)[0])
    reference = plain_transformer()
    with one_rank(recipe) as trainer:
        direction = random_direction(trainer)
        move(trainer, direction, 0.02)
        before = trainer.weights()
        got = trainer.update(shares).policy["kl"]
        assert largest_difference(before, trainer.weights()) == 0.0
    policy = copy.deepcopy(reference)
    values = []
    with torch.no_grad():
        for name, p in policy.named_parameters():
            p.add_(direction[f"transformer.{name}"], alpha=0.02)
        for block in shares[0]:
            for step in range(block.num_steps):
                mean, std = sde_mean_and_std(policy, block, step)
                mean_ref, _ = sde_mean_and_std(reference, block, step)
                dt = block.next_sigmas["visual"][step] - block.sigmas["visual"][step]
                scale = 2 * std**2 if form == "transition" else 2 * std**2 / -dt
                values += ((mean - mean_ref) ** 2 / scale).flatten(1).mean(dim=1).tolist()
    assert got > 1e-5
    assert got == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_rollout_with_nothing_to_train_makes_no_step(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, "trainer.ranks=2", "trainer.steps_per_rollout=2")
    constant = make_batch(recipe, groups_of(recipe, score=lambda key: 0.25))
    assert (constant.num_steps, constant.num_pairs, constant.shares) == (0, 0, [[], []])
    failed = make_batch(recipe, groups_of(recipe, score=lambda key: math.nan))
    assert failed.num_steps == 0
    assert failed.advantages.num_masked == 8


def test_ranks_get_equal_numbers_of_steps_whatever_was_filtered(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, "trainer.ranks=2", "trainer.steps_per_rollout=2")

    def only_the_first_microgroup(key: SampleKey) -> float:
        if key.group == 1:
            return 0.5
        return [1.0, 0.0, math.nan, math.nan][key.index]

    batch = make_batch(recipe, groups_of(recipe, score=only_the_first_microgroup))
    assert batch.num_steps == 1
    assert [[len(blocks) for blocks in share] for share in batch.shares] == [[1], [1]]
    assert batch.num_pairs == 2 * 2
    assert [share[0][0].num_pairs for share in batch.shares] == [4, 0]  # the second rank keeps in step with weight 0


def test_several_optimizer_steps_on_one_rollout(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, "trainer.steps_per_rollout=2", "trainer.ema_decay=0.5")
    (share,) = shares_of(recipe)
    assert len(share) == 2
    with one_rank(recipe) as trainer:
        metrics = trainer.update(share)
        together = trainer.weights()
        assert trainer.core.num_steps == metrics.num_steps == 2
    with one_rank(recipe) as trainer:
        first, second = trainer.update(share[:1]), trainer.update(share[1:])
        assert largest_difference(together, trainer.weights()) == 0.0
    assert metrics.policy["ratio_max_deviation"] == first.policy["ratio_max_deviation"] == 0.0
    assert second.policy["ratio_max_deviation"] > 0.0  # the old log-probs are those of the rollout
    assert metrics.loss == pytest.approx((first.loss + second.loss) / 2)
    assert metrics.grad_norm == max(first.grad_norm, second.grad_norm)


def test_learning_rate_of_zero_changes_no_bit(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, FROZEN)
    with one_rank(recipe) as trainer:
        before = trainer.weights()
        trainer.update(shares_of(recipe)[0])
        assert largest_difference(before, trainer.weights()) == 0.0


def test_publish_of_moving_average_and_live_weights(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, LORA, "trainer.ema_decay=0.9")
    worker = Worker(tiny_model())
    with one_rank(recipe) as trainer:
        trainer.update(shares_of(recipe)[0])
        held: list[dict[str, Tensor]] = []
        for ema in (True, False):
            manifest = trainer.publish(1, ema=ema)
            assert manifest is not None
            worker.update_from_manifest(manifest)
            trainer.unpublish()
            held.append({f"transformer.{n}": p.clone() for n, p in worker.components.transformer.named_parameters()})
        live = trainer.weights()
        assert trainer.core.ema is not None
        shadow = {name: value.full_tensor() for name, value in trainer.core.ema.shadow.items()}  # type: ignore[attr-defined]
    names: Sequence[str] = list(live)
    assert largest_difference({n: held[0][n] for n in names}, shadow) == 0.0
    assert largest_difference({n: held[1][n] for n in names}, live) == 0.0
    assert largest_difference(live, shadow) > 1e-5
