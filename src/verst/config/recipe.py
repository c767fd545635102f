"""The recipe of an RL run (rollouts, rewards, updates) and its cross-section rules, each with its remedy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from verst.config import sections as s
from verst.config.checks import divides, nearest_divisor, nearest_fit
from verst.config.filters import check_filters
from verst.config.placement import check_placement
from verst.config.precision import check_precision
from verst.config.rewards import is_group_wise
from verst.config.rewards import reward_name as reward_name
from verst.config.schedule import check_schedule
from verst.config.supervised import SftRecipe as SftRecipe
from verst.config.watch import check_watch
from verst.errors import ConfigError


class RlRecipe(s.Section):
    """A reinforcement-learning run."""

    run: s.RunConfig
    model: s.ModelConfig
    sampling: s.SamplingConfig
    prompts: s.PromptsConfig
    rollout: s.RolloutConfig
    rewards: Annotated[tuple[s.RewardConfig, ...], Field(min_length=1)]
    algorithm: s.AlgorithmConfig
    schedule: s.ScheduleConfig = s.SyncSchedule()
    trainer: s.TrainerConfig
    engine: s.EngineConfig = s.NativeEngine()
    sync: s.SyncConfig = s.AutoSync()
    checkpoint: s.RlCheckpointConfig = s.RlCheckpointConfig()
    eval: s.EvalConfig = s.EvalConfig()
    watch: s.WatchConfig = s.WatchConfig()
    cluster: s.ClusterConfig = s.ClusterConfig()
    supervision: s.SupervisionConfig = s.SupervisionConfig()
    trackers: s.TrackerConfig = s.TrackerConfig()

    @property
    def training_judges(self) -> tuple[s.RewardConfig, ...]:
        """What scores the samples of a rollout."""
        return (*self.rewards, *(self.watch.gold if self.watch.gold_on_training_every else ()))

    @property
    def judges(self) -> tuple[s.RewardConfig, ...]:
        """What scores held-out samples."""
        return (*self.rewards, *self.watch.gold)

    @property
    def decodes_rollouts(self) -> bool:
        """Some reward looks at the media of a rollout's samples; else they stay latents."""
        return not all(reward.sees_latents for reward in self.training_judges)

    @property
    def decodes_heldout(self) -> bool:
        """The same of held-out samples, which a grid of pictures may ask for as well."""
        return self.eval.grid is not None or not all(reward.sees_latents for reward in self.judges)

    @property
    def guides_in_two_passes(self) -> bool:
        """Each side of the guided velocity is a forward of its own, in engine and trainer alike."""
        return self.sampling.guidance_gradient == "conditional" or isinstance(self.engine, s.SglangEngine)

    @model_validator(mode="after")
    def _rules(self) -> RlRecipe:
        divides("rollout.microgroup_size", self.rollout.microgroup_size, "rollout.group_size", self.rollout.group_size)
        divides(
            "trainer.steps_per_rollout", self.trainer.steps_per_rollout, "rollout.num_groups", self.rollout.num_groups
        )
        check_filters(self.rollout.filters, self.rollout.dynamic, num_groups=self.rollout.num_groups)
        check_schedule(self.schedule, self.algorithm, kept_for=self.rollout.dynamic.staleness)
        self._check_tiles()
        self._check_steps()
        self._check_reference()
        self._check_rewards()
        self._check_sync()
        check_precision(self.trainer.precision, forward=self.model.dtype, reduces=True)
        check_placement(
            self.cluster.placement,
            ranks=self.trainer.ranks,
            engines=self.engine.num,
            finetune=self.model.finetune.type,
            lora_form=self.sync.lora,
            offloads=self.trainer.offload.parameters,
            per_engine=self.engine.parallel.ranks,
            tensor=self.trainer.parallel.tensor,
        )
        check_compiled(self.model, self.trainer.parallel, per_engine=self.engine.parallel.ranks)
        if isinstance(self.engine, s.SglangEngine):
            check_sglang(self)
        self.cluster.sleep.check(
            self.cluster.placement.type, staleness=self.schedule.staleness, finetune=self.model.finetune.type
        )
        check_watch(
            self.watch,
            self.algorithm,
            trained=[reward_name(reward) for reward in self.rewards],
            gold=gold_names(self),
            best_metric=self.checkpoint.best_metric if self.checkpoint.keep_best else None,
            pictures=self.decodes_rollouts,
        )
        if self.trainer.train_text_encoders:
            raise ConfigError(
                "trainer.train_text_encoders = true is for SFT: in RL the engine's text encoders are frozen"
            )
        return self

    def _check_tiles(self) -> None:
        tile, micro, ranks = self.trainer.tile_size, self.rollout.microgroup_size, self.trainer.data_ranks
        own = self.algorithm.own_block_size
        if own is not None:
            # How many blocks there are depends on the rewards, so ranks may differ by one.
            if tile % own:
                raise ConfigError(
                    f"trainer.tile_size = {tile}: {self.algorithm.label} compares samples {own} by {own} in one forward, so "
                    f"it must be a multiple of {own}"
                )
            return
        if tile % micro and micro % tile:
            raise ConfigError(
                f"trainer.tile_size = {tile} neither divides rollout.microgroup_size = {micro} nor is a multiple of it; "
                f"nearest that fits: {nearest_fit(tile, micro)}"
            )
        microgroups = self.rollout.num_groups * self.rollout.group_size // micro // self.trainer.steps_per_rollout
        if microgroups % ranks:
            sequence = self.trainer.parallel.same_samples
            shared = f" / {sequence} ranks of one sequence = {ranks}" if sequence > 1 else ""
            raise ConfigError(
                f"trainer.ranks = {self.trainer.ranks}{shared} does not divide the {microgroups} microgroups of an "
                "optimizer step (rollout.num_groups x rollout.group_size / rollout.microgroup_size / "
                f"trainer.steps_per_rollout); nearest that does: {nearest_divisor(ranks, microgroups) * sequence}"
            )

    def _check_steps(self) -> None:
        steps, num_steps = self.sampling.steps, self.sampling.num_steps
        if isinstance(steps, s.RangedSteps):
            if steps.high > num_steps:
                raise ConfigError(f"sampling.steps.high = {steps.high} is past sampling.num_steps = {num_steps}")
            if steps.high - steps.low < steps.size:
                raise ConfigError(
                    f"sampling.steps.size = {steps.size} does not fit between low = {steps.low} and high = {steps.high}"
                )
        if self.algorithm.needs_stochastic_steps:
            self._check_noise()
            return
        label = self.algorithm.label
        if not isinstance(steps, s.NoSteps):
            raise ConfigError(
                f"sampling.steps.type = {steps.type}: {label} trains on clean samples of a deterministic sampler; use none"
            )
        if self.sampling.shared_initial_noise:
            raise ConfigError(
                "sampling.shared_initial_noise = true: without a stochastic step all samples of a group would be the same "
                f"picture, and {label} compares them; use false"
            )
        if self.sampling.guidance_scale > 1:
            raise ConfigError(
                f"sampling.guidance_scale = {self.sampling.guidance_scale:g}: {label} samples and trains without guidance; "
                "use 1"
            )

    def _check_noise(self) -> None:
        """Every trained step needs noise: without it there is no log-prob and so no ratio."""
        steps, num_steps, label = self.sampling.steps, self.sampling.num_steps, self.algorithm.label
        if isinstance(steps, s.NoSteps):
            raise ConfigError(
                f"sampling.steps.type = none makes no step stochastic, so {label} has nothing to train; "
                "use all, window, random, sliding or branch"
            )
        if self.sampling.transition.eta == 0:
            raise ConfigError(f"sampling.transition.eta = 0 makes no step stochastic, so {label} has nothing to train")
        last = steps.high if isinstance(steps, s.RangedSteps) else num_steps
        if isinstance(self.sampling.transition, s.CpsTransition) and last == num_steps:
            raise ConfigError(
                "sampling.steps may reach the last step, which has no noise under the cps transition and so no log-prob; "
                f"use steps with high = {num_steps - 1}"
            )

    def _check_reference(self) -> None:
        if not self.algorithm.needs_reference:
            return
        reference = self.algorithm.reference
        if isinstance(reference, s.AdapterOffReference) and not isinstance(self.model.finetune, s.LoraFinetune):
            raise ConfigError(
                "algorithm.reference = adapter_off needs model.finetune.type = lora; with full fine-tuning use type = frozen"
            )
        if isinstance(reference, s.EmaReference) and self.trainer.ema_decay is None:
            raise ConfigError("algorithm.reference = ema needs trainer.ema_decay, e.g. 0.99")

    def _check_sync(self) -> None:
        if self.sync.lora == "merged_in_engine" and not isinstance(self.model.finetune, s.LoraFinetune):
            raise ConfigError(
                "sync.lora = merged_in_engine needs model.finetune.type = lora; full fine-tuning has no pairs to merge"
            )

    def _check_rewards(self) -> None:
        if self.rollout.group_size == 1:
            raise ConfigError(
                "rollout.group_size = 1 leaves every sample without another to be better than, so its advantage is 0; "
                "use at least 2"
            )
        if all(reward.weight == 0 for reward in self.rewards):
            raise ConfigError(
                "rewards: every weight is 0, so there is nothing to train on; give one a weight, e.g. 1.0"
            )
        names = [reward_name(reward) for reward in self.rewards]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"rewards: {twice} appear twice; give them a `name` of their own")
        if all(is_group_wise(reward) for reward in self.rewards if reward.weight != 0):
            raise ConfigError(
                "rewards: all that have a weight compare the samples of a group, so held-out samples would have no reward; "
                "give one of another kind a weight"
            )
        compared = [reward_name(r) for r in self.watch.gold if is_group_wise(r) or r.rank]
        if compared:
            raise ConfigError(f"watch.gold: {compared} compare the samples of a group, and held-out samples have none")
        if self.eval.weights == "ema" and self.trainer.ema_decay is None:
            raise ConfigError("eval.weights = ema needs trainer.ema_decay, e.g. 0.99")


Recipe = RlRecipe | SftRecipe


def check_compiled(model: s.ModelConfig, parallel: s.ParallelConfig, *, per_engine: int) -> None:
    """Exchanges of tokens or parts of layers inside of a block are no part of what is compiled."""
    inside = {
        "trainer.parallel.ulysses": parallel.ulysses,
        "trainer.parallel.ring": parallel.ring,
        "trainer.parallel.tensor": parallel.tensor,
        "engine.parallel": per_engine,
    }
    cut = [f"{key} = {degree}" for key, degree in inside.items() if degree > 1]
    if model.compile != "off" and cut:
        raise ConfigError(
            f"model.compile = {model.compile} with {', '.join(cut)}: blocks that exchange tokens between ranks are not compiled; "
            "use off, or FSDP2 alone (trainer.parallel with 1 for each of these)"
        )


def check_sglang(recipe: RlRecipe) -> None:
    """What the contract of SGLang-Diffusion's servers does not have, each with what would be right."""
    model, sampling, algorithm = recipe.model, recipe.sampling, recipe.algorithm
    wanted: list[tuple[str, object, object]] = [
        ("model.compile", model.compile, "off"),
        ("model.fp32_modules", model.fp32_modules, ()),
        ("sampling.storage_dtype", sampling.storage_dtype, "float32"),
        ("sampling.log_prob_reduction", sampling.log_prob_reduction, "mean"),
        ("sampling.shared_initial_noise", sampling.shared_initial_noise, False),
        ("cluster.sleep.engine", recipe.cluster.sleep.engine, "off"),
    ]
    for key, value, only in wanted:
        if value != only:
            raise ConfigError(
                f"{key} = {value!r}: engine.type = sglang has {only!r} alone; use that, or engine.type = native"
            )
    for key, section, kind in (
        ("sampling.transition", sampling.transition, s.DanceTransition),
        ("sampling.steps", sampling.steps, s.BranchSteps),
        ("cluster.placement", recipe.cluster.placement, s.ColocatedPlacement),
    ):
        if isinstance(section, kind):
            raise ConfigError(
                f"{key}.type = {section.type}: engine.type = sglang has none such; use another, or engine.type = native"
            )
    reads = getattr(algorithm, "old_log_probs", "recompute") == "rollout"
    if algorithm.needs_stochastic_steps and model.dtype != "float32" and reads:
        raise ConfigError(
            f"algorithm.old_log_probs = rollout with engine.type = sglang and model.dtype = {model.dtype}: the server's "
            'log-probs are of latents before they are rounded; set algorithm.old_log_probs = "recompute"'
        )


def gold_names(recipe: RlRecipe) -> list[str]:
    """The gold rewards' names, in the recipe's order."""
    return [reward_name(reward) for reward in recipe.watch.gold]
