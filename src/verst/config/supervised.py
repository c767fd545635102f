"""The recipe of a supervised run and its cross-section rules, each with its remedy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from verst.config import sections as s
from verst.config.checks import divides
from verst.errors import ConfigError


class SftRecipe(s.Section):
    """A supervised run on pairs of caption and media."""

    run: s.RunConfig
    model: s.ModelConfig
    init: Literal["glyphs"] | None = None
    """Build this small model from nothing at model.path when the folder is missing."""
    save_dtype: s.DType = "float32"
    """Transformer and autoencoder of the pipeline that the run writes are rounded to this."""
    sampling: s.SizedSamplingConfig
    prompts: s.PromptsConfig
    data: s.TextLinesData
    autoencoder: s.AutoencoderConfig = s.AutoencoderConfig()
    rewards: Annotated[tuple[s.RewardConfig, ...], Field(min_length=1)]
    algorithm: s.SftConfig
    trainer: s.TrainerConfig
    stop: s.SftStopConfig = s.SftStopConfig()
    checkpoint: s.CheckpointConfig = s.CheckpointConfig()
    eval: s.EvalConfig = s.EvalConfig()
    trackers: s.TrackerConfig = s.TrackerConfig()

    @model_validator(mode="after")
    def _rules(self) -> SftRecipe:
        divides("trainer.tile_size", self.trainer.tile_size, "algorithm.batch_size", self.algorithm.batch_size)
        if self.trainer.ranks != 1:
            raise ConfigError(f"trainer.ranks = {self.trainer.ranks}: SFT runs in one process, so it must be 1")
        if self.model.dtype != "float32":
            raise ConfigError(f'model.dtype = "{self.model.dtype}": SFT trains and evaluates in "float32"')
        if self.eval.weights == "ema" and self.trainer.ema_decay is None:
            raise ConfigError("eval.weights = ema needs trainer.ema_decay, e.g. 0.99")
        low, high = self.stop.reward_at_least, self.stop.reward_at_most
        if high is not None and (low is None or low > high):
            raise ConfigError(f"stop.reward_at_most = {high} needs a stop.reward_at_least below it")
        return self
