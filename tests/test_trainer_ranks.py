"""Two trainer ranks over gloo do what one does."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from run_fixtures import recipe_with
from trainer_fixtures import (
    CALM_ADAM,
    LORA,
    largest_difference,
    more_ranks,
    one_rank,
    rank_step,
    shares_of,
    uneven_score,
)

from verst.types import SampleKey

ON_CLEAN_SAMPLES = ('sampling.steps={type="none"}', "sampling.shared_initial_noise=false")
STEPS = "trainer.steps_per_rollout=2"
ISLANDS = ("model.dtype=bfloat16", 'model.fp32_modules=["norm_out", "norm1"]')
CASES: dict[str, tuple[str, ...]] = {
    "full": (),
    "lora": (LORA, "sampling.guidance_scale=3.0"),
    "uneven": ("rollout.group_size=6", "rollout.num_groups=2"),
    "hsdp": ("trainer.parallel.replicate=2", STEPS, 'trainer.activation_checkpointing="selective"'),
    "ulysses": ("trainer.parallel.ulysses=2", STEPS),
    "ulysses_lora": (
        "trainer.parallel.ulysses=2",
        'trainer.activation_checkpointing="full"',
        LORA,
        "sampling.guidance_scale=3.0",
        "algorithm.kl_beta=0.5",
    ),
    "ring": ("trainer.parallel.ring=2", 'trainer.activation_checkpointing="full"'),
    "tensor": (
        "trainer.parallel.tensor=2",
        'trainer.activation_checkpointing="selective"',
        'trainer.optimizer={type="adamw", implementation="fused"}',
        STEPS,
    ),
    "tensor_lora": ("trainer.parallel.tensor=2", LORA, "sampling.guidance_scale=3.0", "algorithm.kl_beta=0.5"),
    "two_steps_with_kl": (
        STEPS,
        "algorithm.kl_beta=0.5",
        'algorithm.reference={type="frozen"}',
        "trainer.offload={parameters=true, reference=true}",
    ),
    # The policy before the first step is computed ahead for the second step, of which one rank has fewer tiles.
    "guard_two_uneven_steps": (
        'algorithm={type="grpo_guard", old_log_probs="recompute", clip_low=0.5, clip_high=0.5}',
        "trainer.steps_per_rollout=2",
        "rollout.num_groups=4",
    ),
    # Reference and old policy by exchanged weights; blocks of two from all over a group.
    "dpo": (
        *ON_CLEAN_SAMPLES,
        'algorithm={type="dpo", beta_dpo=50.0, reference={type="ema"}}',
        "trainer.ema_decay=0.9",
        "trainer.offload={optimizer=true, reference=true}",
    ),
    "islands": (*ISLANDS, STEPS),
    "islands_hsdp_lora": (
        *ISLANDS,
        'model.finetune={type="lora", rank=2, alpha=4.0, targets=["attn.to_q", "norm_out.linear"]}',
        "trainer.parallel.replicate=2",
    ),
    "awm": (*ON_CLEAN_SAMPLES, 'algorithm={type="awm", kl_old=0.1}'),
}


def score(name: str, key: SampleKey) -> float:
    """In the uneven case one of six microgroups has no reward, so that one rank has two blocks and the other three."""
    if name == "uneven" and key.group == 1 and key.index >= 4:
        return math.nan
    if name == "guard_two_uneven_steps" and key.group == 3 and key.index >= 2:
        return math.nan
    return uneven_score(key)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """case -> weights and metrics of one rank ("alone") and of each of two; all cases in one pair of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    found: dict[str, dict[str, Any]] = {}
    for name, overrides in CASES.items():
        alone = [
            line
            for line in overrides
            if not line.startswith(("trainer.parallel.", "trainer.activation_", "trainer.offload"))
        ]
        recipe = recipe_with(folder, CALM_ADAM, *alone)
        both = recipe_with(folder, CALM_ADAM, "trainer.ranks=2", *overrides)
        (share,) = shares_of(recipe, score=lambda key, name=name: score(name, key))
        shares = shares_of(both, score=lambda key, name=name: score(name, key))
        torch.save({"recipe": both, "shares": shares}, folder / f"{name}.case")
        with one_rank(recipe) as trainer:
            before, metrics = trainer.weights(), trainer.update(share)
            found[name] = {"before": before, "alone": trainer.weights(), "metrics": metrics, "shares": shares}
    more_ranks(rank_step, folder)
    for name, case in found.items():
        case |= {f"rank{r}": torch.load(folder / f"{name}.rank{r}", weights_only=False) for r in range(2)}
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_step_as_one(results: dict[str, dict[str, Any]], name: str) -> None:
    case = results[name]
    first, second = case["rank0"], case["rank1"]
    assert largest_difference(first["weights"], second["weights"]) == 0.0
    assert largest_difference(first["weights"], case["alone"]) <= 1e-6
    assert largest_difference(case["before"], case["alone"]) > 1e-4
    assert first["metrics"] == second["metrics"]
    exact = {"ratio_max_deviation", "log_prob_max_difference"} & first["metrics"].policy.keys()
    for value in (first["metrics"].policy[key] for key in exact):
        assert value <= (1e-4 if name in ("ring", "tensor", "tensor_lora") else 0.0)
    assert ("ratio_max_deviation" in first["metrics"].policy) == (name not in ("dpo", "awm"))
    for field in ("loss", "grad_norm"):
        assert getattr(first["metrics"], field) == pytest.approx(getattr(case["metrics"], field), rel=1e-4, abs=1e-7)
    assert first["metrics"].policy == pytest.approx(case["metrics"].policy, rel=1e-4, abs=1e-6)
    assert first["metrics"].num_steps == case["metrics"].num_steps == (2 if STEPS in CASES[name] else 1)


def _is_cut(name: str) -> bool:
    gives = re.search(r"attn\.(to_[qkv]|add_[qkv]_proj)\.|\.net\.0\.proj\.", name)
    takes = re.search(r"attn\.(to_out\.0|to_add_out)\.|\.net\.2\.", name)
    if "lora_" in name:
        return bool(gives and "lora_B" in name) or bool(takes and "lora_A" in name)
    return bool(gives) or bool(takes and name.endswith(".weight"))


def test_each_rank_holds_its_part(results: dict[str, dict[str, Any]]) -> None:
    for layout, case in results.items():
        for name, whole in case["alone"].items():
            island = "islands" in layout and ({"norm_out", "norm1"} & set(name.split(".")))
            assert (name not in case["rank0"]["shards"]) == bool(island)
            if island:
                continue
            if "hsdp" in layout:
                assert [case[f"rank{r}"]["shards"][name] for r in range(2)] == [whole.shape] * 2
                continue
            parts = [math.prod(case[f"rank{r}"]["shards"][name]) for r in range(2)]
            if "tensor" in layout:
                # Heads and hidden units are the first dimension of what makes them, the second of what takes them.
                assert parts == [whole.numel() // (2 if _is_cut(name) else 1)] * 2
                continue
            assert sum(parts) == whole.numel()
            assert max(parts) < whole.numel() or whole.shape[0] == 1


def test_uneven_case_is_uneven(results: dict[str, dict[str, Any]]) -> None:
    shares = results["uneven"]["shares"]
    assert [len(share[0]) for share in shares] == [3, 2]
    assert [sum(block.num_pairs for block in share[0]) for share in shares] == [12, 8]
