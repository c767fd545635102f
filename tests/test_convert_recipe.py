"""`verst convert-recipe`: settings of flow_grpo and miles_diffusion as recipes, with nothing lost in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import here

from verst.cli import convert, convert_flow_grpo, convert_miles
from verst.config import load_recipe
from verst.config.recipe import RlRecipe

FLOW_GRPO: dict[str, Any] = {
    "run_name": "sd3_ocr",
    "seed": 42,
    "num_epochs": 300,
    "mixed_precision": "bf16",
    "use_lora": True,
    "dataset": "dataset/ocr",
    "prompt_fn": "general_ocr",
    "resolution": 512,
    "save_dir": "logs/ocr",
    "pretrained": {"model": "models/sd35", "revision": "main"},
    "sample": {
        "num_steps": 10,
        "eval_num_steps": 40,
        "guidance_scale": 4.5,
        "train_batch_size": 9,
        "num_image_per_prompt": 24,
        "num_batches_per_epoch": 4,
        "global_std": True,
        "noise_level": 0.8,
        "same_latent": False,
        "kl_reward": 0,
    },
    "train": {
        "batch_size": 9,
        "gradient_accumulation_steps": 2,
        "num_inner_epochs": 1,
        "timestep_fraction": 0.99,
        "learning_rate": 3e-4,
        "adam_beta2": 0.99,
        "clip_range": 1e-5,
        "beta": 0.04,
        "ema": True,
    },
    "reward_fn": {"ocr": 1, "pickscore": 0.5, "unifiedreward": 0.25},
}
MILES = r"""
python train_diffusion.py \
  --hf-checkpoint models/sd35 --prompt-data data/a.jsonl --eval-prompt-data ocr data/b.jsonl \
  --loss-type policy_loss --rollout-batch-size 8 --n-samples-per-prompt 16 --rollout-microgroup-size 8 \
  --num-rollout 600 --diffusion-noise-level 0.7 --diffusion-num-sde-steps 2 --diffusion-sde-window-range 0 5 \
  --diffusion-kl-beta 0.04 --use-lora --lora-rank 32 --lora-target-modules to_q to_k --lr 3e-4 --global-batch-size 64 \
  --micro-batch-size-sample 4 --micro-batch-size-tstep 2 --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --colocate \
  --rm-type ocr --use-miles-router --sglang-mem-fraction 0.5
"""


def converted(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *options: object) -> RlRecipe:
    source, out = folder / "theirs.txt", folder / "ours.toml"
    source.write_text(text)
    assert here(monkeypatch, "convert-recipe", source, "--out", out, *options) == 0
    recipe = load_recipe(out)
    assert isinstance(recipe, RlRecipe)
    return recipe


def test_flow_grpo_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = converted(monkeypatch, tmp_path, json.dumps(FLOW_GRPO), "--gpus", 32)
    told = capsys.readouterr().out
    assert (recipe.run.name, recipe.run.seed, recipe.run.iterations) == ("sd3_ocr", 42, 300)
    assert (recipe.model.path, recipe.model.dtype) == (Path("models/sd35"), "bfloat16")
    assert recipe.model.finetune.model_dump()["rank"] == 32
    # 4 batches of 9 on 32 GPUs are 48 groups of 24, in two optimizer steps; 9 does not divide 24, 8 does.
    assert (recipe.rollout.num_groups, recipe.rollout.group_size, recipe.rollout.microgroup_size) == (48, 24, 8)
    assert (recipe.trainer.steps_per_rollout, recipe.trainer.tile_size) == (2, 8)
    assert recipe.sampling.transition.model_dump() == {"type": "sde", "eta": 0.8}
    assert recipe.sampling.steps.model_dump() == {"type": "window", "size": 9, "low": 0, "high": 9}
    algorithm = recipe.algorithm.model_dump()
    assert (algorithm["clip_low"], algorithm["clip_high"], algorithm["kl_beta"]) == (1e-5, 1e-5, 0.04)
    assert (algorithm["kl_form"], algorithm["advantage"]["std"]) == ("no_dt", "batch")
    assert (recipe.trainer.lr, recipe.trainer.betas, recipe.trainer.ema_decay) == (3e-4, (0.9, 0.99), 0.9)
    assert [(r.type, r.weight) for r in recipe.rewards] == [("ocr", 1.0), ("pick_score", 0.5)]
    assert str(recipe.prompts.heldout) == "dataset/ocr/test.txt"
    for words in (
        "assumed: rollout.microgroup_size = 8 in place of 9: it must divide",
        "assumed: trainer.weight_decay = 0.0001: flow_grpo's default of train.adam_weight_decay",
        "no counterpart: sample.eval_num_steps = 40: held-out samples",
        "no counterpart: save_dir = 'logs/ocr'",
        "unifiedreward is none of docs/rewards.md",
    ):
        assert words in told
        assert words in (tmp_path / "ours.toml").read_text()
    assert "kl_reward" not in told


def test_flow_grpo_as_lines_with_a_window_and_cps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "# fast",
        "config.sample.num_steps = 10",
        "config.sample.sde_type = 'cps'",
        "config.sample.sde_window_size = 3",
        "config.sample.sde_window_range = (0, 10)",
        "config.sample.guidance_scale = 1",
        "config.use_lora = False",
        "config.train.beta = 0.01",
        "config.reward_fn = {'geneval': 1.0}",
        "config.train.wings = 2",
    ]
    recipe = converted(monkeypatch, tmp_path, "\n".join(lines))
    told = capsys.readouterr().out
    assert recipe.sampling.steps.model_dump() == {"type": "window", "size": 3, "low": 0, "high": 9}
    assert (recipe.sampling.transition.type, recipe.sampling.guidance_scale) == ("cps", 1.0)
    assert (recipe.model.finetune.type, recipe.algorithm.model_dump()["reference"]["type"]) == ("full", "frozen")
    assert "no counterpart: train.wings = 2: verst has no such setting" in told
    assert "assumed: rewards = ocr: none was said that verst has" in told
    assert "say --gpus N" in told


def test_miles_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = converted(monkeypatch, tmp_path, MILES)
    told = capsys.readouterr().out
    assert (recipe.run.name, recipe.run.iterations, recipe.model.path) == ("ours", 600, Path("models/sd35"))
    assert (str(recipe.prompts.train), str(recipe.prompts.heldout)) == ("data/a.jsonl", "data/b.jsonl")
    finetune = recipe.model.finetune.model_dump()
    assert (finetune["rank"], finetune["alpha"], finetune["targets"]) == (32, 64.0, ("to_q", "to_k"))
    assert recipe.sampling.steps.model_dump() == {"type": "window", "size": 2, "low": 0, "high": 5}
    # 8 prompts x 16 samples in batches of 64.
    assert (recipe.trainer.steps_per_rollout, recipe.trainer.tile_size, recipe.trainer.ranks) == (2, 8, 2)
    assert (recipe.engine.num, recipe.cluster.placement.type) == (2, "colocated")
    assert recipe.engine.router.enabled
    # What their command leaves out is their default.
    assert (recipe.sampling.guidance_scale, recipe.sampling.height, recipe.trainer.lr) == (4.0, 512, 3e-4)
    assert "assumed: sampling.guidance_scale = 4.0: miles_diffusion's default of diffusion-guidance-scale" in told
    assert "no counterpart: sglang-mem-fraction = 0.5" in told


def test_miles_nft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (
        "--loss-type nft --use-ema --ema-decay-flat-steps 5 --ema-decay-ramp 0.01 --ema-decay-max 0.9 --use-lora "
        "--diffusion-clip-range 1e-4 --rollout-batch-size 6 --n-samples-per-prompt 4 --rm-type pickscore"
    )
    recipe = converted(monkeypatch, tmp_path, flags)
    algorithm = recipe.algorithm.model_dump()
    assert (algorithm["old_flat"], algorithm["old_ramp"], algorithm["old_decay"]) == (5, 0.01, 0.9)
    assert (recipe.sampling.steps.type, recipe.sampling.guidance_scale) == ("none", 1.0)
    # Their 8 GPUs divide the 24 microgroups of one sample.
    assert (recipe.rollout.microgroup_size, recipe.trainer.ranks) == (1, 8)


def test_miles_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = converted(monkeypatch, tmp_path, "--diffusion-kl-beta 0.04 --adam-beta2 0.99 --rm-type ocr")
    algorithm = recipe.algorithm.model_dump()
    assert (recipe.model.finetune.type, algorithm["reference"]["type"]) == ("full", "frozen")
    assert recipe.trainer.betas == (0.9, 0.99)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{not json", "begins as JSON and is none"),
        ("what is this", "line 1: 'what is this' is neither `key = value` nor `--flag value`"),
        ("--lr 'open", "is no list of flags"),
        (
            "mixed_precision = 'fp8'",
            "mixed_precision = 'fp8' is not what that setting takes (known are 'fp16', 'bf16', 'no'); correct",
        ),
        ("--diffusion-num-sde-steps two", "diffusion-num-sde-steps = 'two' is not what that setting takes"),
        ("--diffusion-sde-window-range 0", "a window or list of steps is not as miles_diffusion writes it"),
        ("--rollout-batch-size many", "rollout.num_groups would be 'many', which must be a count from 1"),
        ("--lr fast", "lr = 'fast' is not what that setting takes"),
        (
            "--eval-prompt-data \"['one']\"",
            "eval-prompt-data = ['one'] is not what that setting takes (it is a name and a path)",
        ),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    (tmp_path / "theirs.txt").write_text(text)
    out = tmp_path / "ours.toml"
    assert here(monkeypatch, "convert-recipe", tmp_path / "theirs.txt", "--out", out) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_the_page_names_every_setting() -> None:
    page = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
    for source, dashes in ((convert_flow_grpo, ""), (convert_miles, "--")):
        names = [*source.RULES, *source.ABSENT]
        assert len(set(names)) == len(names)
        assert [name for name in names if f"| `{dashes}{name}` |" not in page] == []
        assert [k for k in source.RULES.values() if isinstance(k, str) and f"| `{k}` |" not in page] == []


def test_a_fault_of_a_rule_is_not_called_a_wrong_setting() -> None:
    def broken(draft: convert.Draft, value: object) -> None:
        raise KeyError(value)

    draft = convert.Draft(theirs={"lr": 1.0}, gpus=None)
    with pytest.raises(KeyError):
        convert._take(draft, "lr", 1.0, {"lr": broken}, {})
