"""What miles_diffusion's flags are called here. docs/migration.md shows the same as a table."""

from __future__ import annotations

from typing import Any

from verst.cli.convert import OCR, Draft, Rule, number, one_of, reward, together

REWARDS: dict[str, dict[str, Any]] = {
    "ocr": OCR,
    "pickscore": {"type": "pick_score", "path": "models/PickScore_v1"},
    "hps": {"type": "hps_v2", "path": "models/HPSv2"},
}
"""--rm-type -> ours."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _heldout(draft: Draft, value: Any) -> None:
    """`name path ...`: the first of them."""
    pair = value if isinstance(value, list) else ["", value]
    if len(pair) < 2:
        raise ValueError("it is a name and a path")
    draft.values["prompts.heldout"] = str(pair[1])
    if len(pair) > 2:
        draft.absent["eval-prompt-data"] = f"one file of held-out prompts; {pair[1]} was taken, {pair[3::2]} not"


def _reward(draft: Draft, value: Any) -> None:
    reward(draft, "rm-type", str(value), REWARDS, 1.0)


RULES: dict[str, str | Rule] = {
    "hf-checkpoint": "model.path",
    "prompt-data": "prompts.train",
    "eval-prompt-data": _heldout,
    "rollout-shuffle": "prompts.shuffle",
    "rollout-seed": "run.seed",
    "num-rollout": "run.iterations",
    "rollout-batch-size": "rollout.num_groups",
    "n-samples-per-prompt": "rollout.group_size",
    "rollout-microgroup-size": "rollout.microgroup_size",
    "rollout-parser-num-workers": "rollout.parsers.num",
    "num-steps-per-rollout": "trainer.steps_per_rollout",
    "global-batch-size": together,
    "micro-batch-size": "trainer.tile_size",
    "micro-batch-size-sample": together,
    "micro-batch-size-tstep": together,
    "diffusion-num-steps": "sampling.num_steps",
    "diffusion-guidance-scale": number("sampling.guidance_scale"),
    "diffusion-true-cfg-scale": number("sampling.guidance_scale"),
    "diffusion-negative-prompt": "sampling.negative_prompt",
    "diffusion-height": "sampling.height",
    "diffusion-width": "sampling.width",
    "diffusion-output-num-frames": "sampling.num_frames",
    "diffusion-fps": number("sampling.fps"),
    "diffusion-flow-shift": number("sampling.sigma_shift"),
    "diffusion-noise-level": together,
    "diffusion-sde-type": together,
    "diffusion-step-strategy-path": together,
    "diffusion-num-sde-steps": together,
    "diffusion-sde-window-range": together,
    "diffusion-sde-candidate-steps": together,
    "diffusion-clip-range": number("algorithm.clip_low", "algorithm.clip_high"),
    "diffusion-kl-beta": number("algorithm.kl_beta"),
    "diffusion-adv-clip-max": number("algorithm.advantage.clamp"),
    "diffusion-recompute-old-log-prob": one_of("algorithm.old_log_probs", {True: "recompute", False: "rollout"}),
    "diffusion-forward-dtype": one_of("model.dtype", _DTYPES),
    "loss-type": one_of("algorithm.type", {"policy_loss": "flow_grpo", "nft": "nft"}),
    "globalize-reward-std": one_of("algorithm.advantage.std", {True: "batch", False: "group"}),
    "disable-grpo-std-normalization": one_of("algorithm.advantage.std", {True: "none", False: "group"}),
    "ref-mode": one_of("algorithm.reference", {"lora_base": {"type": "adapter_off"}, "ref": {"type": "frozen"}, "ema": {"type": "ema"}, "none": {"type": "adapter_off"}}),
    "use-lora": together,
    "lora-rank": together,
    "lora-alpha": together,
    "lora-target-modules": together,
    "lora-adapter-path": together,
    "lr": number("trainer.lr"),
    "adam-beta1": together,
    "adam-beta2": together,
    "adam-eps": number("trainer.adam_epsilon"),
    "weight-decay": number("trainer.weight_decay"),
    "clip-grad": number("trainer.grad_clip"),
    "lr-warmup-iters": "trainer.warmup_steps",
    "gradient-checkpointing": one_of("trainer.activation_checkpointing", {True: "full", False: "none"}),
    "fsdp-master-dtype": one_of("trainer.precision.master", {"fp32": "float32", "bf16": "forward"}),
    "fsdp-reduce-dtype": one_of("trainer.precision.reduce", {"fp32": "float32", "bf16": "bfloat16"}),
    "fsdp-cpu-offload": "trainer.offload.parameters",
    "dp-replicate-size": "trainer.parallel.replicate",
    "ulysses-degree": together,
    "sequence-parallel-size": together,
    "actor-num-nodes": together,
    "actor-num-gpus-per-node": together,
    "rollout-num-gpus": together,
    "rollout-num-gpus-per-engine": together,
    "use-miles-router": "engine.router.enabled",
    "colocate": together,
    "eval-interval": "eval.every",
    "save-interval": "checkpoint.every",
    "save": "run.folder",
    "rm-type": _reward,
    "deterministic-mode": "run.deterministic",
    "use-ema": together,
    "ema-decay-flat-steps": together,
    "ema-decay-ramp": together,
    "ema-decay-max": together,
}  # fmt: skip
"""Their flag, without dashes -> our key, or what to do with its value."""
ABSENT = {
    "rollout-function-path": "there is one rollout",
    "eval-function-path": "there is one evaluation",
    "diffusion-eval-num-steps": "held-out samples are made with sampling.num_steps",
    "diffusion-guidance-scale-2": "both experts are guided by sampling.guidance_scale",
    "diffusion-log-prob-no-const": "log-probs are densities",
    "diffusion-generator-device": "noise follows from seed and sample alone",
    "diffusion-model-family": "a folder is recognised by its model_index.json",
    "train-pipeline-config-path": "families: ARCHITECTURE.md says where to add one",
    "rollout-patch-group": "engine and trainer call the same forward",
    "custom-rm-path": "a reward of type = python: docs/rewards.md",
    "custom-generate-function-path": "there is one rollout",
    "dynamic-sampling-filter-path": "rollout.filters and rollout.dynamic: docs/prompts.md",
    "use-wandb": "trackers.wandb, with a project",
    "use-miles-dashboard": "`verst dashboard` reads every run",
    "globalize-reward-mean": "advantages are relative to the group's mean",
    "load": "the same command goes on with a run",
    "update-weight-buffer-size": "sync.bucket_bytes, in bytes",
}
"""Their flag -> why there is none."""

DEFAULTS: dict[str, tuple[str, Any]] = {
    "diffusion-guidance-scale": ("sampling.guidance_scale", 4.0),
    "diffusion-height": ("sampling.height", 512),
    "diffusion-width": ("sampling.width", 512),
    "diffusion-forward-dtype": ("model.dtype", "bfloat16"),
    "lr": ("trainer.lr", 1e-6),
}
"""Their flag -> our key and what it is where their command does not say."""


def finish(draft: Draft) -> None:
    """Flags that mean something only together."""
    theirs, values = draft.theirs, draft.values
    draft.assume("algorithm.type", "flow_grpo", "policy_loss is their default")
    _lora(draft)
    _steps(draft)
    _batches(draft)
    _processes(draft)
    draft.betas("adam-beta1", "adam-beta2")
    if values["algorithm.type"] == "nft":
        old = {"flat": "old_flat", "ramp": "old_ramp", "max": "old_decay"}
        for name, key in zip(("ema-decay-flat-steps", "ema-decay-ramp", "ema-decay-max"), old.values(), strict=True):
            if name in theirs:
                values[f"algorithm.{key}"] = theirs[name] if key == "old_flat" else float(theirs[name])
        for key in ("clip_low", "clip_high", "old_log_probs"):
            if values.pop(f"algorithm.{key}", None) is not None:
                draft.assumed[f"algorithm.{key}"] = "left out: NFT has no ratio to clip"
        return
    if theirs.get("use-ema"):
        draft.assume("trainer.ema_decay", draft.real("ema-decay-max", 0.5), "ema-decay-max; there is no ramp here")
    if values.get("algorithm.kl_beta"):
        draft.assume("algorithm.kl_form", "no_dt", "their KL leaves dt out")


def _lora(draft: Draft) -> None:
    theirs = draft.theirs
    if not theirs.get("use-lora"):
        draft.values["model.finetune"] = {"type": "full"}
        return
    finetune: dict[str, Any] = {
        "type": "lora",
        "rank": draft.count("lora-rank", 64),
        "alpha": draft.real("lora-alpha", 64),
    }
    targets = theirs.get("lora-target-modules")
    if targets:
        finetune["targets"] = list(targets) if isinstance(targets, list | tuple) else str(targets).split(",")
    if theirs.get("lora-adapter-path"):
        finetune["init"] = str(theirs["lora-adapter-path"])
    draft.values["model.finetune"] = finetune


def _steps(draft: Draft) -> None:
    theirs, num = draft.theirs, draft.steps()
    kind = theirs.get("diffusion-sde-type", "sde")
    if kind == "ode" or draft.values["algorithm.type"] == "nft":
        draft.values["sampling.steps"] = {"type": "none"}
        return
    draft.values["sampling.transition"] = {"type": kind, "eta": draft.real("diffusion-noise-level", 0.7)}
    size = draft.count("diffusion-num-sde-steps", 0) or num
    chosen, window = theirs.get("diffusion-sde-candidate-steps"), theirs.get("diffusion-sde-window-range")
    if chosen is not None:
        steps = sorted(map(int, chosen if isinstance(chosen, list) else str(chosen).split(",")))
        draft.values["sampling.steps"] = {"type": "random", "size": size, "low": steps[0], "high": steps[-1] + 1}
        if steps != list(range(steps[0], steps[-1] + 1)):
            draft.assumed["sampling.steps"] = (
                f"every step from {steps[0]} to {steps[-1]} may be drawn, not {steps} alone"
            )
        return
    low, high = (
        int(x)
        for x in (window if isinstance(window, list) else str(f"0,{num}" if window is None else window).split(","))
    )
    draft.values["sampling.steps"] = {"type": "window", "size": min(size, high - low), "low": low, "high": high}


def _batches(draft: Draft) -> None:
    theirs, values = draft.theirs, draft.values
    batch = theirs.get("global-batch-size")
    if batch and "num-steps-per-rollout" not in theirs:
        samples = draft.count("rollout-batch-size", 8) * draft.count("n-samples-per-prompt", 1)
        values["trainer.steps_per_rollout"] = max(1, samples // (draft.count("global-batch-size", 1) or 1))
    if "micro-batch-size-sample" in theirs:
        values["trainer.tile_size"] = draft.count("micro-batch-size-sample", 1) * int(
            theirs.get("micro-batch-size-tstep", 1)
        )


def _processes(draft: Draft) -> None:
    theirs, values = draft.theirs, draft.values
    ranks = draft.count("actor-num-nodes", 1) * draft.count("actor-num-gpus-per-node", 8)
    if "actor-num-gpus-per-node" not in theirs:
        draft.assumed["trainer.ranks"] = f"{ranks}: their default is 8 GPUs of each node"
    values["trainer.ranks"] = ranks
    ulysses = draft.count("ulysses-degree", 0) or draft.count("sequence-parallel-size", 1)
    if ulysses > 1:
        values["trainer.parallel.ulysses"] = ulysses
    per_engine = max(1, draft.count("rollout-num-gpus-per-engine", 1))
    engines = max(1, draft.count("rollout-num-gpus", ranks) // per_engine)
    if per_engine > 1:
        values["engine.parallel.ulysses"] = per_engine
        draft.assumed["engine.parallel.ulysses"] = f"{per_engine}: an engine's GPUs share tokens here, layers there"
    values["engine.num"] = ranks if theirs.get("colocate") and per_engine == 1 else engines
    if theirs.get("colocate") and per_engine == 1:
        values["cluster.placement"] = {"type": "colocated"}
    elif not theirs.get("colocate"):
        values["cluster.placement"] = {"type": "separate"}
