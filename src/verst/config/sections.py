"""The tables of a recipe. Frozen, unknown keys refused; the text under a field is its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from verst.config.algorithms import AdapterOffReference as AdapterOffReference

# `as` marks what is read through this module as well.
from verst.config.algorithms import AdvantageConfig as AdvantageConfig
from verst.config.algorithms import AlgorithmBase as AlgorithmBase
from verst.config.algorithms import AlgorithmConfig as AlgorithmConfig
from verst.config.algorithms import AwmConfig as AwmConfig
from verst.config.algorithms import DpoConfig as DpoConfig
from verst.config.algorithms import EmaReference as EmaReference
from verst.config.algorithms import FlowGrpoConfig as FlowGrpoConfig
from verst.config.algorithms import FrozenReference as FrozenReference
from verst.config.algorithms import GrpoGuardConfig as GrpoGuardConfig
from verst.config.algorithms import NftConfig as NftConfig
from verst.config.algorithms import OnlineSftConfig as OnlineSftConfig
from verst.config.algorithms import PythonAlgorithm as PythonAlgorithm
from verst.config.algorithms import StreamWeights as StreamWeights
from verst.config.basis import CompileBackend as CompileBackend
from verst.config.basis import DType as DType
from verst.config.basis import (
    Flag,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from verst.config.basis import Section as Section
from verst.config.data import AutoencoderConfig as AutoencoderConfig
from verst.config.engine import ClusterConfig as ClusterConfig
from verst.config.engine import EngineConfig as EngineConfig
from verst.config.engine import NativeEngine as NativeEngine
from verst.config.engine import SglangEngine as SglangEngine
from verst.config.filters import DynamicConfig as DynamicConfig
from verst.config.filters import FilterConfig as FilterConfig
from verst.config.filters import NoFilter as NoFilter
from verst.config.filters import PythonFilter as PythonFilter
from verst.config.filters import RewardRangeFilter as RewardRangeFilter
from verst.config.filters import ZeroVarianceFilter as ZeroVarianceFilter
from verst.config.optimizers import AdamW8bitOptimizer as AdamW8bitOptimizer
from verst.config.optimizers import AdamWOptimizer as AdamWOptimizer
from verst.config.optimizers import SgdOptimizer as SgdOptimizer
from verst.config.placement import ColocatedPlacement as ColocatedPlacement
from verst.config.placement import FreePlacement as FreePlacement
from verst.config.placement import PlacementConfig as PlacementConfig
from verst.config.placement import SeparatePlacement as SeparatePlacement
from verst.config.placement import SleepConfig as SleepConfig
from verst.config.precision import PrecisionConfig as PrecisionConfig
from verst.config.rewards import AestheticReward as AestheticReward
from verst.config.rewards import AvSyncReward as AvSyncReward
from verst.config.rewards import BrightnessReward as BrightnessReward
from verst.config.rewards import ClapReward as ClapReward
from verst.config.rewards import ClipScoreReward as ClipScoreReward
from verst.config.rewards import GenEvalReward as GenEvalReward
from verst.config.rewards import HpsV2Reward as HpsV2Reward
from verst.config.rewards import HpsV3Reward as HpsV3Reward
from verst.config.rewards import ImageRewardReward as ImageRewardReward
from verst.config.rewards import JpegSizeReward as JpegSizeReward
from verst.config.rewards import ModelReward as ModelReward
from verst.config.rewards import OcrReward as OcrReward
from verst.config.rewards import PickScoreReward as PickScoreReward
from verst.config.rewards import PromptReward as PromptReward
from verst.config.rewards import PythonReward as PythonReward
from verst.config.rewards import RewardBase as RewardBase
from verst.config.rewards import RewardConfig as RewardConfig
from verst.config.schedule import AsyncSchedule as AsyncSchedule
from verst.config.schedule import ScheduleConfig as ScheduleConfig
from verst.config.schedule import SyncSchedule as SyncSchedule
from verst.config.steps import AllSteps as AllSteps
from verst.config.steps import BranchSteps as BranchSteps
from verst.config.steps import CpsTransition as CpsTransition
from verst.config.steps import DanceTransition as DanceTransition
from verst.config.steps import NoSteps as NoSteps
from verst.config.steps import RandomSteps as RandomSteps
from verst.config.steps import RangedSteps as RangedSteps
from verst.config.steps import SdeTransition as SdeTransition
from verst.config.steps import SlidingSteps as SlidingSteps
from verst.config.steps import StepsConfig as StepsConfig
from verst.config.steps import TransitionConfig as TransitionConfig
from verst.config.steps import WindowSteps as WindowSteps
from verst.config.supervision import SupervisionConfig as SupervisionConfig
from verst.config.sync import AutoSync as AutoSync
from verst.config.sync import ChosenSync as ChosenSync
from verst.config.sync import CollectiveSync as CollectiveSync
from verst.config.sync import CudaIpcSync as CudaIpcSync
from verst.config.sync import DiskSync as DiskSync
from verst.config.sync import ShmSync as ShmSync
from verst.config.sync import SyncConfig as SyncConfig
from verst.config.trackers import MlflowConfig as MlflowConfig
from verst.config.trackers import TrackerConfig as TrackerConfig
from verst.config.trackers import TrackioConfig as TrackioConfig
from verst.config.trackers import WandbConfig as WandbConfig
from verst.config.trainer import OffloadConfig as OffloadConfig
from verst.config.trainer import ParallelConfig as ParallelConfig
from verst.config.trainer import TrainerConfig as TrainerConfig
from verst.config.watch import AlarmConfig as AlarmConfig
from verst.config.watch import ClipFractionAlarm as ClipFractionAlarm
from verst.config.watch import DiversityCollapseAlarm as DiversityCollapseAlarm
from verst.config.watch import EarlyStopConfig as EarlyStopConfig
from verst.config.watch import GradNormAlarm as GradNormAlarm
from verst.config.watch import KlAlarm as KlAlarm
from verst.config.watch import LoopLagAlarm as LoopLagAlarm
from verst.config.watch import MaskedFractionAlarm as MaskedFractionAlarm
from verst.config.watch import NonFiniteAlarm as NonFiniteAlarm
from verst.config.watch import RatioDriftAlarm as RatioDriftAlarm
from verst.config.watch import RewardDropAlarm as RewardDropAlarm
from verst.config.watch import RewardHackingAlarm as RewardHackingAlarm
from verst.config.watch import WatchConfig as WatchConfig
from verst.config.watch import ZeroSignalAlarm as ZeroSignalAlarm
from verst.errors import ConfigError


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run; its folder is `folder/name`."""
    folder: Path = Path("runs")
    """Where run folders live."""
    seed: NonNegativeInt = 0
    """Everything random in the run follows from this number."""
    iterations: PositiveInt
    """RL: rollouts; SFT: optimizer steps."""
    deterministic: Flag = True
    """One microgroup is one engine batch of fixed shape: the same bits whatever the timing."""
    threads: NonNegativeInt = 0
    """CPU threads of torch in engine and trainer alike (equal numerics need equal threads); 0 = all cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engine and trainer compute; auto takes CUDA where there is one."""


class FullFinetune(Section):
    type: Literal["full"] = "full"


class LoraFinetune(Section):
    type: Literal["lora"] = "lora"
    rank: PositiveInt = 32
    """Rank r of each A, B pair."""
    alpha: PositiveFloat = 64.0
    """The update is (alpha / rank) B A."""
    targets: tuple[str, ...] | None = None
    """Module name suffixes to adapt; unset = the family's default."""
    init: Path | None = None
    """A LoRA to start from instead of a random one: a safetensors file of PEFT or diffusers, or a folder with one (of `verst export`, or `adapter` in a checkpoint). Rank, alpha and targets must be the file's."""


class ModelConfig(Section):
    path: Path
    """A local folder in the diffusers layout (with model_index.json), or a hub id where there is a network."""
    dtype: DType = "float32"
    """Compute dtype of the transformer, in engine and trainer alike."""
    fp32_modules: tuple[str, ...] = ()
    """Modules of the transformer, by the last part of their names, to compute in float32 as well when dtype is a smaller one; the family's own always are (docs/precision.md)."""
    compile: CompileBackend = "off"
    """torch.compile for the repeated blocks of the transformer, in engine and trainer alike. inductor: generated kernels, faster on a GPU after half a minute for each new shape; on a CPU it needs a C++ compiler. aot_eager: the same graphs by torch's own kernels, which tells whether a fault is Inductor's."""
    max_sequence_length: PositiveInt = 128
    """Tokens of the long text encoder (T5 in SD3)."""
    long_prompts: Literal["refuse", "truncate"] = "refuse"
    """What happens to a prompt longer than its encoder takes; truncation is counted."""
    finetune: Annotated[FullFinetune | LoraFinetune, Field(discriminator="type")] = FullFinetune()
    """What is trained: all of the transformer, or LoRA pairs."""

    @model_validator(mode="after")
    def _islands(self) -> ModelConfig:
        if self.fp32_modules and self.dtype == "float32":
            raise ConfigError(
                f'model.fp32_modules = {list(self.fp32_modules)} with model.dtype = "float32": all is in float32 '
                "already; leave fp32_modules out, or set a smaller dtype"
            )
        for name in self.fp32_modules:
            if not name or "." in name:
                raise ConfigError(
                    f"model.fp32_modules names {name!r}; it must be one part of a dotted name, the last: "
                    f"{name.rpartition('.')[2] or 'norm_out'!r}"
                )
        return self


class SamplingConfig(Section):
    """Read by engine and trainer alike."""

    height: PositiveInt | None = None
    """Pixels; unset = the model's own, or the condition image's."""
    width: PositiveInt | None = None
    """Pixels; unset = the model's own, or the condition image's."""
    num_frames: PositiveInt = 1
    """Frames of a video; 1 = an image."""
    fps: PositiveFloat | None = None
    """Frames a second; unset = the model's own."""
    num_steps: PositiveInt = 10
    """Denoising steps T."""
    guidance_scale: NonNegativeFloat = 1.0
    """Classifier-free guidance; at most 1 = off, one forward a step. Of the families that guide from 0 on (docs/families.md) 0 is off."""
    guidance_gradient: Literal["both", "conditional"] = "both"
    """Through which side of the guided velocity gradients flow. conditional: the unconditional side is computed without, as flow_grpo does: another estimator, less memory and time; each side is then a forward of its own, in engine and trainer alike."""
    negative_prompt: str = ""
    """Only read with guidance."""
    sigma_shift: PositiveFloat | None = None
    """Shift of the sigma grid; unset = the checkpoint's own."""
    storage_dtype: DType = "float32"
    """A latent is rounded to this, and the rounded value is fed on and scored."""
    log_prob_reduction: Literal["mean", "sum"] = "mean"
    """Over the elements of a latent. Clip ranges of the literature are for the mean; a sum is as many times as large."""
    shared_initial_noise: Flag = False
    """All samples of a group start from one initial latent."""
    transition: TransitionConfig = SdeTransition()
    """How a stochastic step moves."""
    steps: StepsConfig = AllSteps()
    """Which steps are stochastic, and so trained."""


class SizedSamplingConfig(SamplingConfig):
    """SFT draws its data at this size."""

    height: PositiveInt
    """Pixels."""
    width: PositiveInt
    """Pixels."""


class PromptsConfig(Section):
    train: Path
    """Prompts to train on: .txt (one a line), .jsonl, .csv or .parquet (column `prompt`); docs/prompts.md."""
    heldout: Path
    """Prompts that are only evaluated."""
    shuffle: Flag = True
    """A new order every epoch, from the run's seed."""


class ParsersConfig(Section):
    num: PositiveInt = 1
    """Processes that decode engine responses off the event loop."""
    dispatch: Literal["least_loaded", "round_robin"] = "least_loaded"
    """Which of them decodes the next microgroup."""


class RolloutConfig(Section):
    num_groups: PositiveInt
    """Prompts of one rollout."""
    group_size: PositiveInt
    """Samples of one prompt; the advantage is relative to them."""
    microgroup_size: PositiveInt
    """Samples of one engine request; divides group_size."""
    parsers: ParsersConfig = ParsersConfig()
    transport: Literal["auto", "msgpack", "shm"] = "auto"
    """How samples come from the engines: msgpack over HTTP, or shm, shared memory that every process of a host maps. auto: shm from each engine that shares a host with driver and parsers, where the system has memfd; else msgpack."""
    compression: Literal["none", "zstd", "lz4"] = "none"
    """Of what comes as msgpack, for thin links. Latents and frames of a generator hardly get smaller."""
    shared_bytes: PositiveInt = 4 * 2**30
    """Most shared memory of one engine, and of the driver for what comes as msgpack. Where it is full, samples come over HTTP into the driver's own memory."""
    filters: tuple[FilterConfig, ...] = (ZeroVarianceFilter(),)
    """Which groups are not trained on; each group is dropped by the first filter that refuses it. [] = none."""
    dynamic: DynamicConfig = DynamicConfig()
    """Sampling until enough groups have passed the filters."""


class CheckpointConfig(Section):
    every: PositiveInt = 10
    """Iterations between checkpoints; the last iteration is always saved."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""


class RlCheckpointConfig(CheckpointConfig):
    async_save: Flag = False
    """Copy the tensors to host memory and write them while the run goes on; a checkpoint appears when all ranks have
    written, and a run that is killed before continues from the one before it."""
    keep_best: Flag = False
    """Save after every evaluation that is the best so far, the one before training included, and keep that one besides
    the newest."""
    best_metric: str = "reward/heldout"
    """What best is measured by: reward/heldout, reward/heldout/<name> or reward/gold/<name>; larger is better."""


class EvalConfig(Section):
    every: PositiveInt = 10
    """Iterations between evaluations; start and end are always evaluated."""
    num_prompts: PositiveInt = 64
    """Held-out prompts, the first of the file."""
    batch_size: PositiveInt = 16
    """Prompts of one engine request."""
    seed: NonNegativeInt = 0
    """Fixed noise: the same pictures every time."""
    grid: PositiveInt | None = None
    """Pictures in the PNG grid; unset = 16. Where all rewards are of latents only a number here has samples decoded."""
    weights: Literal["live", "ema"] = "live"
    """Which weights are evaluated; ema needs trainer.ema_decay."""

    @property
    def num_pictures(self) -> int:
        """In the grid, of samples that were decoded."""
        return self.grid or 16
