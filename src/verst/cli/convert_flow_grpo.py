"""What flow_grpo's config values are called here. docs/migration.md shows the same as a table."""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import Any

from verst.cli.convert import OCR, Draft, Rule, number, one_of, reward, together

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "no": "float32"}
REWARDS: dict[str, dict[str, Any]] = {
    "ocr": OCR,
    "video_ocr": OCR,
    "jpeg_compressibility": {"type": "jpeg_size", "direction": "smaller"},
    "jpeg_incompressibility": {"type": "jpeg_size", "direction": "larger"},
    "pickscore": {"type": "pick_score", "path": "models/PickScore_v1"},
    "imagereward": {"type": "image_reward", "path": "models/ImageReward"},
    "clipscore": {"type": "clip_score", "path": "models/clip-vit-large-patch14"},
    "hpsv2": {"type": "hps_v2", "path": "models/HPSv2"},
}
"""Their reward -> ours."""


def _only(neutral: tuple[Any, ...], name: str, why: str) -> Rule:
    """Without counterpart, but said only where its value means anything."""

    def rule(draft: Draft, value: Any) -> None:
        if value not in neutral:
            draft.absent[name] = why

    return rule


def _size(draft: Draft, value: Any) -> None:
    draft.values.setdefault("sampling.height", int(value))
    draft.values.setdefault("sampling.width", int(value))


def _dataset(draft: Draft, value: Any) -> None:
    if not value:
        return
    folder = PurePosixPath(str(value))
    train, test = (
        ("train_metadata.jsonl", "test_metadata.jsonl")
        if draft.theirs.get("prompt_fn") == "geneval"
        else ("train.txt", "test.txt")
    )
    draft.values |= {"prompts.train": str(folder / train), "prompts.heldout": str(folder / test)}


def _lora(draft: Draft, value: Any) -> None:
    if not value:
        draft.values["model.finetune"] = {"type": "full"}
        return
    finetune: dict[str, Any] = {"type": "lora", "rank": 32, "alpha": 64}
    if draft.theirs.get("train.lora_path"):
        finetune["init"] = str(draft.theirs["train.lora_path"])
    draft.assume("model.finetune", finetune, "flow_grpo's scripts fix rank 32 and alpha 64")


def _name(draft: Draft, value: Any) -> None:
    if value:
        draft.values["run.name"] = str(value).replace("/", "-").lstrip("-._")


def _rewards(draft: Draft, value: Any) -> None:
    for name, weight in dict(value).items():
        reward(draft, "reward_fn", name, REWARDS, float(weight))


RULES: dict[str, str | Rule] = {
    "run_name": _name,
    "seed": "run.seed",
    "num_epochs": "run.iterations",
    "logdir": "run.folder",
    "save_freq": "checkpoint.every",
    "num_checkpoint_limit": "checkpoint.keep",
    "eval_freq": "eval.every",
    "mixed_precision": one_of("model.dtype", _DTYPES),
    "use_lora": _lora,
    "train.lora_path": together,
    "dataset": _dataset,
    "prompt_fn": together,
    "resolution": _size,
    "height": "sampling.height",
    "width": "sampling.width",
    "frames": "sampling.num_frames",
    "activation_checkpointing": one_of("trainer.activation_checkpointing", {True: "full", False: "none"}),
    "fsdp_optimizer_offload": "trainer.offload.optimizer",
    "pretrained.model": "model.path",
    "pretrained.revision": _only((None, "main"), "pretrained.revision", "a folder has one revision"),
    "sample.num_steps": "sampling.num_steps",
    "sample.guidance_scale": number("sampling.guidance_scale"),
    "sample.train_batch_size": together,
    "sample.mini_num_image_per_prompt": together,
    "sample.num_batches_per_epoch": together,
    "sample.num_image_per_prompt": "rollout.group_size",
    "sample.test_batch_size": "eval.batch_size",
    "sample.global_std": one_of("algorithm.advantage.std", {True: "batch", False: "group"}),
    "sample.noise_level": together,
    "sample.sde_type": together,
    "sample.same_latent": "sampling.shared_initial_noise",
    "sample.sde_window_size": together,
    "sample.sde_window_range": together,
    "sample.kl_reward": _only((0, 0.0), "sample.kl_reward", "KL stands in the loss here: algorithm.kl_beta"),
    "train.batch_size": "trainer.tile_size",
    "train.use_8bit_adam": one_of("trainer.optimizer", {True: {"type": "adamw_8bit"}, False: {"type": "adamw"}}),
    "train.learning_rate": number("trainer.lr"),
    "train.adam_beta1": together,
    "train.adam_beta2": together,
    "train.adam_weight_decay": number("trainer.weight_decay"),
    "train.adam_epsilon": number("trainer.adam_epsilon"),
    "train.max_grad_norm": number("trainer.grad_clip"),
    "train.gradient_accumulation_steps": together,
    "train.num_inner_epochs": together,
    "train.cfg": together,
    "train.adv_clip_max": number("algorithm.advantage.clamp"),
    "train.clip_range": number("algorithm.clip_low", "algorithm.clip_high"),
    "train.timestep_fraction": together,
    "train.beta": number("algorithm.kl_beta"),
    "train.ema": together,
    "train.sft": _only((0, 0.0), "train.sft", "no supervised data in an RL run"),
    "per_prompt_stat_tracking": together,
    "reward_fn": _rewards,
    "prompt_fn_kwargs": _only(({}, None), "prompt_fn_kwargs", "prompts come from files"),
    "resume_from": _only((None, ""), "resume_from", "the same command goes on with a run"),
}
"""Their setting -> our key, or what to do with its value."""
ABSENT = {
    "debug": "verst --debug shows tracebacks",
    "allow_tf32": "float32 is computed in float32",
    "save_dir": "a run's folder is run.folder/run.name",
    "sample.eval_num_steps": "held-out samples are made with sampling.num_steps",
    "sample.eval_guidance_scale": "held-out samples are made with sampling.guidance_scale",
    "sample.batch_size": "an older name that its scripts no longer read",
    "sample.sample_time_per_prompt": "raise rollout.group_size instead",
    "sample.train_num_steps": "sampling.steps says which steps are trained",
    "train.clip_range_lt": "read where train.clip_range is not: algorithm.clip_low",
    "train.clip_range_gt": "read where train.clip_range is not: algorithm.clip_high",
    "train.timestep_shift": "of Bagel alone, a model that verst does not have",
    "train.sft_batch_size": "no supervised data in an RL run",
    "diffusion_loss": "no supervised data in an RL run",
}
"""Their setting -> why there is none."""

DEFAULTS: dict[str, tuple[str, Any]] = {
    "sample.num_steps": ("sampling.num_steps", 40),
    "sample.guidance_scale": ("sampling.guidance_scale", 4.5),
    "sample.global_std": ("algorithm.advantage.std", "batch"),
    "train.learning_rate": ("trainer.lr", 3e-4),
    "train.adam_weight_decay": ("trainer.weight_decay", 1e-4),
    "mixed_precision": ("model.dtype", "float16"),
    "use_lora": ("model.finetune", {"type": "lora", "rank": 32, "alpha": 64}),
}
"""Their setting -> our key and what it is where their config does not say."""


def finish(draft: Draft) -> None:
    """Settings that mean something only together."""
    theirs, values = draft.theirs, draft.values
    values["algorithm.type"] = "flow_grpo"
    _batches(draft)
    eta = draft.real("sample.noise_level", 0.7)
    values["sampling.transition"] = {"type": theirs.get("sample.sde_type", "sde"), "eta": eta}
    _steps(draft)
    draft.betas("train.adam_beta1", "train.adam_beta2")
    if "train.clip_range" not in theirs:
        for name, key in (("train.clip_range_lt", "clip_low"), ("train.clip_range_gt", "clip_high")):
            if name in theirs:
                values[f"algorithm.{key}"] = float(theirs[name])
                draft.absent.pop(name, None)
    if values.get("algorithm.kl_beta"):
        draft.assume("algorithm.kl_form", "no_dt", "the form of flow_grpo's code, which leaves dt out")
    if values.get("sampling.guidance_scale", 1.0) > 1:
        draft.assume("sampling.guidance_gradient", "conditional", "flow_grpo computes the other side without gradients")
    if theirs.get("train.ema"):
        draft.assume("trainer.ema_decay", 0.9, "what flow_grpo's scripts fix, there every 8th step")
        draft.assume("eval.weights", "ema", "flow_grpo evaluates the average")


def _batches(draft: Draft) -> None:
    """Their number of groups is batches x samples of a batch x GPUs / samples of a prompt."""
    values = draft.values
    batch = draft.count("sample.mini_num_image_per_prompt", 0) or draft.count("sample.train_batch_size", 1)
    batches, size = (
        draft.count("sample.num_batches_per_epoch", 2),
        draft.count("sample.num_image_per_prompt", 1),
    )
    size, gpus = max(1, size), draft.gpus or 1
    if draft.gpus is None:
        draft.assumed["--gpus"] = "1: flow_grpo's batches are a GPU's; say --gpus N for the number of its run"
    samples = batches * batch * gpus
    values["rollout.num_groups"] = max(1, math.ceil(samples / size))
    if samples % size:
        draft.assumed["rollout.num_groups"] = (
            f"{values['rollout.num_groups']}: {samples} samples are no whole groups of {size}"
        )
    values["rollout.microgroup_size"] = batch
    inner = draft.count("train.num_inner_epochs", 1)
    values["trainer.steps_per_rollout"] = max(
        1, batches * inner // (draft.count("train.gradient_accumulation_steps", 1) or 1)
    )


def _steps(draft: Draft) -> None:
    theirs, values = draft.theirs, draft.values
    num = draft.steps()
    size = theirs.get("sample.sde_window_size")
    if size:
        low, high = theirs.get("sample.sde_window_range") or (0, num)
        values["sampling.steps"] = {"type": "window", "size": int(size), "low": int(low), "high": min(int(high), num)}
        draft.assumed["sampling.steps"] = (
            f"a window of {size}: flow_grpo's fast scripts read sde_window_size, its plain ones train the first steps up to "
            "timestep_fraction; for these take type = all"
        )
        return
    trained = max(1, int(num * draft.real("train.timestep_fraction", 1.0)))
    values["sampling.steps"] = {"type": "window", "size": trained, "low": 0, "high": trained}
