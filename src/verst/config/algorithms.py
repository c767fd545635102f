"""The algorithms, one table each, and what several of them share: advantages and references."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from verst.config.basis import NonNegativeFloat, NonNegativeInt, Number, PositiveFloat, Section, UnitFloat
from verst.config.plugins import ObjectPath
from verst.errors import ConfigError


class AdvantageConfig(Section):
    mixture: Literal["normalize_each", "weighted_sum"] = "normalize_each"
    """Several rewards: normalise each in its group and then weight (GDPO), or add the raw ones first."""
    std: Literal["group", "batch", "none"] = "group"
    """Divide by the standard deviation of the group, of the whole rollout, or not at all."""
    epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation."""
    clamp: PositiveFloat = 5.0
    """Advantages are clamped to +-clamp."""


class AdapterOffReference(Section):
    type: Literal["adapter_off"] = "adapter_off"
    """The reference is the base model: LoRA switched off. No memory of its own."""


class FrozenReference(Section):
    type: Literal["frozen"] = "frozen"
    """The reference is a copy of the weights at the start."""


class EmaReference(Section):
    type: Literal["ema"] = "ema"
    """The reference is the moving average of the policy; needs trainer.ema_decay."""


ReferenceConfig = Annotated[AdapterOffReference | FrozenReference | EmaReference, Field(discriminator="type")]
StreamWeights = dict[Literal["visual", "audio"], NonNegativeFloat]
"""Latent stream -> weight of its loss; 1 where it is not named."""


def num_levels(num_steps: int, fraction: float) -> int:
    """Noise levels that a clean sample of `num_steps` steps is trained at: at least one."""
    return max(1, int(num_steps * fraction))


class AlgorithmBase(Section):
    """What every algorithm of an RL run has, and what it says of itself to the rules between tables."""

    label: ClassVar[str]
    """In messages."""
    own_block_size: ClassVar[int | None] = None
    """Samples of one block of its pairs, all of which must be in one tile; None = a microgroup."""

    stream_weights: StreamWeights = Field(default_factory=dict)
    """Of families with sound: weight of each latent stream in the loss, e.g. { audio = 0.5 }; unset = 1."""
    advantage: AdvantageConfig = AdvantageConfig()

    @property
    def needs_stochastic_steps(self) -> bool:
        """It trains on recorded stochastic steps; else on clean samples of a deterministic sampler."""
        return True

    @property
    def needs_reference(self) -> bool:
        """It compares with a reference policy."""
        return False

    def num_levels(self, num_steps: int) -> int:
        """Noise levels that a clean sample of `num_steps` steps is trained at; 0 where recorded steps are trained."""
        return 0

    def trained_samples(self, group_size: int) -> int:
        """Samples of a group that are trained on, at most."""
        return group_size


class ReferenceKl(Section):
    """Of the algorithms with an optional penalty on the distance to a reference."""

    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL to the reference, in velocity space its squared difference; 0 = no reference is held."""
    reference: ReferenceConfig = AdapterOffReference()

    @property
    def needs_reference(self) -> bool:
        """Only with a weight."""
        return self.kl_beta > 0


class CleanSamples(AlgorithmBase):
    """Of the algorithms that noise clean samples again."""

    timestep_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """Share of the rollout's noise levels that each sample is trained at; at least one level."""

    @property
    def needs_stochastic_steps(self) -> bool:
        return False

    def num_levels(self, num_steps: int) -> int:
        return num_levels(num_steps, self.timestep_fraction)


class ClipRange(Section):
    """Of the algorithms that clip a ratio; they report the share of pairs outside as policy/clip_fraction."""

    clip_low: PositiveFloat = 1e-4
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: PositiveFloat = 1e-4


class ClippedRatio(ClipRange, ReferenceKl, AlgorithmBase):
    """Of the algorithms that clip the ratio of recorded steps."""

    old_log_probs: Literal["rollout", "recompute"] = "rollout"
    """The ratio's denominator: what the engine recorded, or what the trainer computes on the same tiles before the first
    optimizer step of a rollout, which takes one forward more of all later steps' pairs."""
    importance_cap: PositiveFloat | None = None
    """Weigh each pair by min(importance_cap, p_old / p_rollout), for samples of older weights; needs old_log_probs =
    "recompute". Unset = no weights."""
    kl_form: Literal["transition", "no_dt"] = "transition"
    """transition: (mu - mu_ref)^2 / (2 std^2); no_dt divides by 2 g^2 as the published code does."""

    @model_validator(mode="after")
    def _weights_need_two_policies(self) -> ClippedRatio:
        if self.importance_cap is not None and self.old_log_probs == "rollout":
            raise ConfigError(
                f"algorithm.importance_cap = {self.importance_cap:g} weighs by p_old / p_rollout, which is 1 with "
                'old_log_probs = "rollout"; set algorithm.old_log_probs = "recompute"'
            )
        return self


class FlowGrpoConfig(ClippedRatio):
    label: ClassVar[str] = "Flow-GRPO"

    type: Literal["flow_grpo"] = "flow_grpo"


class GrpoGuardConfig(ClippedRatio):
    label: ClassVar[str] = "GRPO-Guard"

    type: Literal["grpo_guard"] = "grpo_guard"
    clip_low: PositiveFloat = 2e-6
    """The normalised ratio is clipped to [1 - clip_low, 1 + clip_high]; it moves less than Flow-GRPO's, by about the
    step's noise."""
    clip_high: PositiveFloat = 2e-6


class OldPolicySchedule(Section):
    """Of the algorithms whose samples come from an old policy that follows the live one."""

    old_flat: NonNegativeInt = 0
    """Rollouts in which the old policy is the live one."""
    old_ramp: NonNegativeFloat = 0.001
    """Growth of the old policy's decay a rollout after that."""
    old_decay: UnitFloat = 0.5
    """Largest decay of the old policy."""


class NftConfig(OldPolicySchedule, ReferenceKl, CleanSamples):
    label: ClassVar[str] = "NFT"

    type: Literal["nft"] = "nft"
    beta: PositiveFloat = 1.0
    """How far the implicit positive and negative policies stand from the old one (published: 1; 0.1 for OCR)."""
    advantage_clip: PositiveFloat = 5.0
    """An advantage of +-this is certainly good or bad."""


class AwmConfig(OldPolicySchedule, ClipRange, ReferenceKl, CleanSamples):
    label: ClassVar[str] = "AWM"

    type: Literal["awm"] = "awm"
    weighting: Literal["uniform", "sigma", "sigma_squared", "ghuber"] = "uniform"
    """What the matching error of a noise level counts: 1, sigma, sigma^2, or sigma times the generalised Huber form
    (e^p - 1e-10^p) / p of the published runs, with p = ghuber_power."""
    ghuber_power: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25
    """p of ghuber."""
    clip_low: PositiveFloat = 0.2
    """The ratio exp(e_old - e) of matching errors is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: PositiveFloat = 0.2
    kl_old: NonNegativeFloat = 0.0
    """Weight of the squared velocity difference to the old policy."""
    old_ramp: NonNegativeFloat = 1.0
    """Growth of the old policy's decay a rollout after that."""
    old_decay: UnitFloat = 0.3
    """Largest decay of the old policy; 0 = it is the live policy at the start of each rollout, and takes no memory."""


class DpoConfig(CleanSamples):
    label: ClassVar[str] = "Diffusion-DPO"
    own_block_size: ClassVar[int | None] = 2

    type: Literal["dpo"] = "dpo"
    beta_dpo: PositiveFloat = 2500.0
    """How sharply the error margin to the reference decides; the published code's beta is twice this number."""
    reference: ReferenceConfig = AdapterOffReference()

    @property
    def needs_reference(self) -> bool:
        return True

    def trained_samples(self, group_size: int) -> int:
        return 2


class OnlineSftConfig(ReferenceKl, CleanSamples):
    label: ClassVar[str] = "online SFT"
    own_block_size: ClassVar[int | None] = 1

    type: Literal["online_sft"] = "online_sft"
    keep_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25
    """Share of a group's scored samples that is trained on, the best ones, rounded up."""
    min_advantage: Number = 0.0
    """And of those only samples with a larger advantage."""

    def trained_samples(self, group_size: int) -> int:
        return math.ceil(group_size * self.keep_fraction)


class PythonAlgorithm(OldPolicySchedule, CleanSamples):
    label: ClassVar[str] = "the algorithm of your own"

    type: Literal["python"] = "python"
    path: ObjectPath
    """`module:object`, or the name of an installed entry point of the group verst.algorithms: a function
    `loss(tile, policies, **options)` with one loss a pair, or a class made with the options that has such a method."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of the class when it is made."""
    pairs: Literal["recorded", "noised"]
    """recorded: stochastic steps of the rollout with their log-probs; noised: clean samples noised again."""
    old_policy: Literal["none", "start", "follows"] = "none"
    """start: the live policy before the first optimizer step on a rollout; follows: one that samples and follows the live
    policy by old_flat, old_ramp and old_decay."""
    reference: ReferenceConfig | None = None
    """Unset = the loss asks for no reference."""

    @property
    def needs_stochastic_steps(self) -> bool:
        return self.pairs == "recorded"

    @property
    def needs_reference(self) -> bool:
        return self.reference is not None


AlgorithmConfig = Annotated[
    FlowGrpoConfig | GrpoGuardConfig | NftConfig | AwmConfig | DpoConfig | OnlineSftConfig | PythonAlgorithm,
    Field(discriminator="type"),
]
