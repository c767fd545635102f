"""The recipe of a supervised run (SFT, offline DPO) and its cross-section rules, each with its remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from verst.config import sections as s
from verst.config.basis import Number, PositiveFloat, PositiveInt, UnitFloat
from verst.config.checks import divides
from verst.config.data import DataConfig, FilesData, PreferenceData, TextLinesData
from verst.config.precision import check_precision
from verst.config.rewards import is_group_wise, reward_name
from verst.errors import ConfigError


class _SupervisedConfig(s.Section):
    """What every supervised loss needs."""

    batch_size: PositiveInt
    """Samples (of DPO: pairs) of one optimizer step; trainer.tile_size divides it."""
    sigma: Literal["uniform", "logit_normal", "mixed", "shifted", "grid"] = "mixed"
    """How noise levels are drawn; mixed = half of a batch uniform, half logit-normal; grid = the model's own steps."""
    sigma_mean: Number = 0.0
    """Of the normal that logit_normal and mixed take the sigmoid of: above 0 is noisier."""
    sigma_std: PositiveFloat = 1.0
    """Its standard deviation."""
    sigma_shift: PositiveFloat | None = None
    """shifted draws s u / (1 + (s - 1) u) with this s and u uniform; needed there, and read only there."""
    stream_sigmas: Literal["shared", "independent"] = "shared"
    """Of families with sound: one noise level for picture and sound, or a draw of its own for each."""
    stream_weights: s.StreamWeights = Field(default_factory=dict)
    """Of families with sound: weight of each latent stream in the loss, e.g. { audio = 0.5 }; unset = 1."""

    @model_validator(mode="after")
    def _shift(self) -> Any:
        if self.sigma == "shifted" and self.sigma_shift is None:
            raise ConfigError("algorithm.sigma = shifted needs algorithm.sigma_shift, e.g. 3.0")
        return self


class SftConfig(_SupervisedConfig):
    type: Literal["sft"] = "sft"
    caption_dropout: UnitFloat = 0.1
    """Share of captions replaced by the empty prompt, for guidance later."""
    weighting: Literal["none", "min_snr"] = "none"
    """Weight of a noise level: all alike, or min((1 - sigma)^2, gamma sigma^2), which is min-SNR on the clean sample."""
    min_snr_gamma: PositiveFloat = 5.0
    """Largest signal-to-noise ratio that min_snr counts."""


class DpoOfflineConfig(_SupervisedConfig):
    type: Literal["dpo_offline"] = "dpo_offline"
    caption_dropout: UnitFloat = 0.0
    """Share of prompts replaced by the empty prompt."""
    beta: PositiveFloat = 1000.0
    """How dear it is to leave the reference; the squared errors are means over elements."""
    reference: Annotated[s.AdapterOffReference | s.FrozenReference, Field(discriminator="type")] = (
        s.AdapterOffReference()
    )


SupervisedConfig = Annotated[SftConfig | DpoOfflineConfig, Field(discriminator="type")]


class HeldOutPrompts(s.Section):
    train: Path | None = None
    """Not read: a supervised run trains on [data]."""
    heldout: Path
    """Prompts whose samples the rewards score."""


class StopConfig(s.Section):
    reward_at_least: Number | None = None
    """Save and stop when the held-out reward first reaches this; unset = run all iterations."""
    reward_at_most: Number | None = None
    """Fail when that first reading is above this: evaluate more often."""


class SftRecipe(s.Section):
    """A supervised run on pairs of caption and media, or on preferences between media."""

    run: s.RunConfig
    model: s.ModelConfig
    init: Literal["glyphs"] | None = None
    """Build this small model from nothing at model.path when the folder is missing."""
    save_dtype: s.DType = "float32"
    """Transformer and autoencoder of the pipeline that the run writes are rounded to this."""
    sampling: s.SizedSamplingConfig
    prompts: HeldOutPrompts | None = None
    """Needed with rewards."""
    data: Annotated[DataConfig, Field(discriminator="type")]
    autoencoder: s.AutoencoderConfig = s.AutoencoderConfig()
    rewards: tuple[s.RewardConfig, ...] = ()
    """Of samples of held-out prompts; may be left out where data.heldout measures the loss."""
    algorithm: SupervisedConfig
    trainer: s.TrainerConfig
    stop: StopConfig = StopConfig()
    checkpoint: s.CheckpointConfig = s.CheckpointConfig()
    eval: s.EvalConfig = s.EvalConfig()
    trackers: s.TrackerConfig = s.TrackerConfig()

    @model_validator(mode="after")
    def _rules(self) -> SftRecipe:
        divides("trainer.tile_size", self.trainer.tile_size, "algorithm.batch_size", self.algorithm.batch_size)
        compared = [reward_name(r) for r in self.rewards if is_group_wise(r) or r.rank]
        if compared:
            raise ConfigError(f"rewards: {compared} compare the samples of a group, which SFT has not; use others")
        if self.trainer.ranks != 1:
            raise ConfigError(f"trainer.ranks = {self.trainer.ranks}: SFT runs in one process, so it must be 1")
        self._check_offload()
        if self.eval.weights == "ema" and self.trainer.ema_decay is None:
            raise ConfigError("eval.weights = ema needs trainer.ema_decay, e.g. 0.99")
        check_precision(self.trainer.precision, forward=self.model.dtype, reduces=False)
        self._check_data()
        self._check_text_encoders()
        self._check_measures()
        if isinstance(self.algorithm, DpoOfflineConfig):
            self._check_reference(self.algorithm)
        return self

    def _check_offload(self) -> None:
        offload = self.trainer.offload
        if offload.parameters:
            raise ConfigError(
                "trainer.offload.parameters = true: FSDP2 moves the blocks of an RL run; in SFT use offload.optimizer"
            )
        if offload.reference and isinstance(self.algorithm, DpoOfflineConfig):
            raise ConfigError(
                "trainer.offload.reference = true: offline DPO reads its reference in every tile; use a LoRA, whose "
                "reference is the base model without a copy"
            )

    def _check_data(self) -> None:
        kind = self.data.type
        if isinstance(self.algorithm, DpoOfflineConfig) != isinstance(self.data, PreferenceData):
            wanted = (
                "preference_manifest" if isinstance(self.algorithm, DpoOfflineConfig) else "a source of single media"
            )
            raise ConfigError(f"algorithm.type = {self.algorithm.type} with data.type = {kind}: use {wanted}")
        if self.autoencoder.steps and not isinstance(self.data, TextLinesData):
            raise ConfigError(
                f"autoencoder.steps = {self.autoencoder.steps} with data.type = {kind}: an autoencoder is only trained on "
                "data.type = text_lines; use 0"
            )

    def _check_text_encoders(self) -> None:
        if not self.trainer.train_text_encoders:
            return
        if self.model.dtype != "float32":
            raise ConfigError(
                f'trainer.train_text_encoders = true with model.dtype = "{self.model.dtype}": use "float32", or leave '
                "the text encoders as they are"
            )
        if isinstance(self.algorithm, DpoOfflineConfig):
            raise ConfigError("trainer.train_text_encoders = true: offline DPO trains the transformer alone; use false")
        if isinstance(self.data, FilesData) and self.data.cache.folder is not None and self.data.cache.text:
            raise ConfigError(
                "data.cache.text = true with trainer.train_text_encoders = true would keep embeddings of weights that "
                "change; set data.cache.text = false"
            )

    def _check_measures(self) -> None:
        heldout = self.data.heldout if isinstance(self.data, FilesData) else 0
        if not self.rewards and not heldout:
            raise ConfigError(
                "nothing would be measured on held-out data: give [[rewards]] and prompts.heldout, or data.heldout = 16"
            )
        if self.rewards and self.prompts is None:
            raise ConfigError("rewards score samples of held-out prompts: prompts.heldout is missing")
        low, high = self.stop.reward_at_least, self.stop.reward_at_most
        if high is not None and (low is None or low > high):
            raise ConfigError(f"stop.reward_at_most = {high} needs a stop.reward_at_least below it")
        if low is not None and not self.rewards:
            raise ConfigError(f"stop.reward_at_least = {low} needs a reward; add [[rewards]] or remove it")

    def _check_reference(self, algorithm: DpoOfflineConfig) -> None:
        lora = isinstance(self.model.finetune, s.LoraFinetune)
        if isinstance(algorithm.reference, s.AdapterOffReference) and not lora:
            raise ConfigError(
                "algorithm.reference = adapter_off needs model.finetune.type = lora; with full fine-tuning use type = frozen"
            )
