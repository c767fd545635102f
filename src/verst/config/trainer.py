"""The trainer's tables: how ranks share the work, the optimizer and its schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from verst.config.basis import Flag, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, UnitFloat
from verst.config.checks import divides
from verst.config.optimizers import AdamW8bitOptimizer, AdamWOptimizer, OptimizerConfig, SgdOptimizer
from verst.config.precision import PrecisionConfig
from verst.errors import ConfigError


class ParallelConfig(Section):
    """Degrees whose product is trainer.ranks. replicate x shard ranks see different samples; ring x ulysses ranks see
    the same ones and hold a part of the tokens each, tensor ranks a part of each layer."""

    replicate: PositiveInt = 1
    """Copies of the sharded model (HSDP)."""
    shard: PositiveInt | None = None
    """FSDP2 ranks of different samples; unset = what is left of trainer.ranks. Sequence ranks shard the model too."""
    ring: PositiveInt = 1
    """Ranks round which keys and values of an attention travel; only for families whose attention has no mask."""
    ulysses: PositiveInt = 1
    """Ranks that exchange tokens for heads around each attention; divides the model's heads."""
    tensor: PositiveInt = 1
    """Ranks that hold some heads and hidden units of each block; divides the model's heads; not with ring or ulysses."""

    @property
    def sequence(self) -> int:
        """Ranks that share the tokens of a sample."""
        return self.ring * self.ulysses

    @property
    def same_samples(self) -> int:
        """Ranks that see the same samples."""
        return self.sequence * self.tensor


class OffloadConfig(Section):
    """What lies in (pinned) host memory instead of the GPU's. Accepted on a CPU too, where it frees nothing."""

    parameters: Flag = False
    """Weights, gradients and optimizer state; FSDP2 brings one block at a time, and the step is taken on the CPU."""
    optimizer: Flag = False
    """Optimizer state; comes to the GPU in parts, where the step is taken."""
    reference: Flag = False
    """Frozen reference, moving average and old policy; come to the GPU by blocks or tensors when they are used."""


class TrainerConfig(Section):
    ranks: PositiveInt = 1
    """Trainer processes."""
    parallel: ParallelConfig = ParallelConfig()
    """How they share the work; by default FSDP2 shards the model over all of them."""
    tile_size: PositiveInt
    """(sample, step) pairs of one forward and backward; equal to rollout.microgroup_size for a ratio of exactly 1."""
    steps_per_rollout: PositiveInt = 1
    """Optimizer steps taken on one rollout; divides rollout.num_groups."""
    lr: NonNegativeFloat = 1e-4
    """Peak learning rate."""
    optimizer: OptimizerConfig = AdamWOptimizer()
    """What takes the steps; docs/precision.md."""
    betas: tuple[UnitFloat, UnitFloat] = (0.9, 0.999)
    """AdamW's moment decays."""
    adam_epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat | None = 1.0
    """Largest global gradient norm; unset keeps the key's default, use a large number to switch it off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine end at 0."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps from 0 to lr."""
    ema_decay: UnitFloat | None = None
    """Moving average of the trained weights, once an optimizer step; unset = none is kept."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Repeated blocks that keep only their inputs for the backward and compute the rest again: none, every
    checkpoint_every-th, or all. Gradients are the same bits; full costs about a third more time. docs/memory.md."""
    checkpoint_every: PositiveInt | None = None
    """Of selective: one block of this many; unset = 2."""
    precision: PrecisionConfig = PrecisionConfig()
    """Dtypes of what is trained and of its gradients."""
    reduce_every_tile: Flag = False
    """Reduce gradients after each tile instead of an optimizer step's last: a rank then holds its shard of them and not
    all in fp32, for more communication. With offload.parameters it is so always."""
    offload: OffloadConfig = OffloadConfig()
    """What lies in host memory; by default nothing does."""
    train_text_encoders: Flag = False
    """SFT only: train the text encoders too."""

    @model_validator(mode="after")
    def _degrees(self) -> TrainerConfig:
        """The degrees make up the ranks."""
        parallel = self.parallel
        if parallel.tensor > 1 and parallel.sequence > 1:
            raise ConfigError(
                f"trainer.parallel.tensor = {parallel.tensor} with ring = {parallel.ring}, ulysses = {parallel.ulysses}: layers "
                "are cut over ranks, or tokens are; use tensor = 1 (ulysses divides the same products, and activations too)"
            )
        if parallel.tensor > 1 and isinstance(self.optimizer, AdamW8bitOptimizer):
            raise ConfigError(
                f"trainer.parallel.tensor = {parallel.tensor} with trainer.optimizer.type = adamw_8bit, whose blocks are of whole "
                "rows: layers are cut in rows too; use adamw"
            )
        for name in ("ulysses", "ring", "tensor", "replicate"):
            degree: int = getattr(parallel, name)
            divides(f"trainer.parallel.{name}", degree, "trainer.ranks", self.ranks)
        others = parallel.replicate * parallel.same_samples
        product = others * (parallel.shard or 1)
        if product != self.ranks if parallel.shard else self.ranks % others:
            raise ConfigError(
                f"trainer.ranks = {self.ranks} is not made up by trainer.parallel: replicate = {parallel.replicate}, "
                f"shard = {parallel.shard or 'unset'}, ring = {parallel.ring}, ulysses = {parallel.ulysses}"
                f"{f', tensor = {parallel.tensor}' if parallel.tensor > 1 else ''}; "
                f"nearest that is: ranks = {max(1, round(self.ranks / product)) * others if not parallel.shard else product}"
            )
        return self

    @model_validator(mode="after")
    def _offload(self) -> TrainerConfig:
        if self.offload.optimizer and isinstance(self.optimizer, AdamW8bitOptimizer):
            raise ConfigError(
                'trainer.offload.optimizer = true with trainer.optimizer.type = "adamw_8bit", whose moments are made of '
                'pieces that stay where they are; use type = "adamw", or leave them on the GPU'
            )
        return self

    @model_validator(mode="after")
    def _checkpointing(self) -> TrainerConfig:
        if self.checkpoint_every is not None and self.activation_checkpointing != "selective":
            raise ConfigError(
                f"trainer.checkpoint_every = {self.checkpoint_every} with trainer.activation_checkpointing = "
                f'"{self.activation_checkpointing}": only selective leaves blocks out; use "selective", or remove it'
            )
        return self

    @model_validator(mode="after")
    def _optimizer(self) -> TrainerConfig:
        if isinstance(self.optimizer, SgdOptimizer):
            for key in ("betas", "adam_epsilon"):
                if key in self.model_fields_set:
                    raise ConfigError(
                        f'trainer.{key} = {getattr(self, key)} with trainer.optimizer.type = "sgd", which has no such '
                        "number; remove it, or use adamw"
                    )
        return self

    @property
    def recompute_every(self) -> int | None:
        """One repeated block of how many is computed again in the backward; None = no block is."""
        return {"none": None, "selective": self.checkpoint_every or 2, "full": 1}[self.activation_checkpointing]

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that see different samples."""
        return self.ranks // self.parallel.same_samples

    def data_rank(self, rank: int) -> int:
        """Which of them `rank` belongs to: ranks of one sample are neighbours."""
        return rank // self.parallel.same_samples
