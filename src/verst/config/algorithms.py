"""The algorithms, one table each, and what several of them share: advantages and references."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verst.config.basis import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, UnitFloat


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


StreamWeights = dict[Literal["visual", "audio"], NonNegativeFloat]
"""Latent stream -> weight of its loss; 1 where it is not named."""


class FlowGrpoConfig(Section):
    type: Literal["flow_grpo"] = "flow_grpo"
    stream_weights: StreamWeights = Field(default_factory=dict)
    """Of families with sound: weight of each latent stream in the loss, e.g. { audio = 0.5 }; unset = 1."""
    clip_low: PositiveFloat = 1e-4
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: PositiveFloat = 1e-4
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL to the reference; 0 = no reference is held."""
    kl_form: Literal["transition", "no_dt"] = "transition"
    """transition: (mu - mu_ref)^2 / (2 std^2); no_dt divides by 2 g^2 as the published code does."""
    reference: Annotated[AdapterOffReference | FrozenReference | EmaReference, Field(discriminator="type")] = (
        AdapterOffReference()
    )
    advantage: AdvantageConfig = AdvantageConfig()


class NftConfig(Section):
    type: Literal["nft"] = "nft"
    stream_weights: StreamWeights = Field(default_factory=dict)
    """Of families with sound: weight of each latent stream in the loss, e.g. { audio = 0.5 }; unset = 1."""
    beta: PositiveFloat = 1.0
    """How far the implicit positive and negative policies stand from the old one (published: 1; 0.1 for OCR)."""
    advantage_clip: PositiveFloat = 5.0
    """An advantage of +-this is certainly good or bad."""
    timestep_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """Share of the rollout's noise levels that each sample is trained at."""
    old_flat: NonNegativeInt = 0
    """Rollouts in which the old policy is the live one."""
    old_ramp: NonNegativeFloat = 0.001
    """Growth of the old policy's decay a rollout after that."""
    old_decay: UnitFloat = 0.5
    """Largest decay of the old policy."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the squared velocity difference to the reference; 0 = no reference is held."""
    reference: Annotated[AdapterOffReference | FrozenReference | EmaReference, Field(discriminator="type")] = (
        AdapterOffReference()
    )
    advantage: AdvantageConfig = AdvantageConfig()


AlgorithmConfig = Annotated[FlowGrpoConfig | NftConfig, Field(discriminator="type")]


class SftConfig(Section):
    type: Literal["sft"] = "sft"
    batch_size: PositiveInt
    """Samples of one optimizer step; trainer.tile_size divides it."""
    sigma: Literal["uniform", "logit_normal", "mixed"] = "mixed"
    """How noise levels are drawn; mixed = half of a batch each."""
    caption_dropout: UnitFloat = 0.1
    """Share of captions replaced by the empty prompt, for guidance later."""
