"""One table each: what scores samples, and how its workers are run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from verst.config.basis import (
    DType,
    Flag,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Section,
)
from verst.config.plugins import ObjectPath
from verst.errors import ConfigError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class RewardBase(Section):
    row_independent: ClassVar[bool] = False
    """A sample's score is the same bits whatever samples are scored in the same call."""
    group_wise: ClassVar[bool] = False
    """A sample's score is by comparison with the others of its group: one call a group, when it is complete."""
    sees_latents: ClassVar[bool] = False
    """It reads final latents and no media: what only such rewards score is not decoded."""

    type: str
    name: Name | None = None
    """Name in metrics; left out: the type. Two rewards of one type need names of their own."""
    weight: Number = 1.0
    """Weight in the mixture."""
    rank: Flag = False
    """Replace the scores of a group by their ranks in it: 0 the worst, 1 the best, equal ones share the mean rank."""
    workers: PositiveInt = 1
    """Processes that score microgroups."""
    num_cpus: NonNegativeFloat = 0.01
    """Ray CPUs that each of them asks for: a share for placement, no limit of use."""
    merge_size: NonNegativeInt = 0
    """Most samples of one call: smaller microgroups share one, larger ones are cut into several, so that idle workers help;
    0: each microgroup is a call of its own. In a deterministic run only for rewards whose scores cannot depend on it."""
    merge_wait_ms: NonNegativeInt = 50
    """Milliseconds that the first sample of a shared call waits for others at most, where a worker is free for it."""
    attempts: PositiveInt = 3
    """Calls before a failure is final."""
    timeout_s: PositiveFloat = 120.0
    """Seconds one call may take."""
    on_failure: Literal["stop", "mask"] = "stop"
    """A final failure stops the run, or leaves the sample out and counts it; it is never a score."""


class FrameChoice(Section):
    """Which frames of a clip a reward sees. An image is its own only frame, whatever stands here."""

    policy: Literal["first", "middle", "last", "uniform", "all"] = "middle"
    """One frame, `count` frames spread evenly over the clip, or every frame."""
    count: PositiveInt = 4
    """Frames of the policy uniform; a shorter clip gives all it has."""


class FramesConfig(FrameChoice):
    """The same for a reward that judges one picture at a time."""

    reduce: Literal["mean", "min", "max"] = "mean"
    """From the scores of the frames to the score of the clip."""


class ImageRewardBase(RewardBase):
    """A reward of single pictures; of clips by `frames`."""

    frames: FramesConfig = FramesConfig()
    """Which frames of a clip it sees, and how their scores become one."""


class OcrReward(ImageRewardBase):
    row_independent: ClassVar[bool] = True

    type: Literal["ocr"] = "ocr"
    mode: Literal["line", "scene"] = "line"
    """line: the image is one line of text, recogniser only; scene: find text first."""
    target: Literal["prompt", "quoted"] = "prompt"
    """Compare with the whole prompt, or with the text between its double quotes."""
    threads: NonNegativeInt = 0
    """CPU threads of the recogniser; 0 = all cores."""
    frames: FramesConfig = FramesConfig(policy="uniform")
    """The mean over four frames of a clip unless said otherwise."""


class JpegSizeReward(ImageRewardBase):
    row_independent: ClassVar[bool] = True

    type: Literal["jpeg_size"] = "jpeg_size"
    quality: Annotated[int, Field(ge=1, le=95, strict=True)] = 95
    direction: Literal["smaller", "larger"] = "smaller"
    """Which file size is better."""
    frames: FramesConfig = FramesConfig(policy="all")
    """The mean over all frames of a clip unless said otherwise."""


class BrightnessReward(ImageRewardBase):
    row_independent: ClassVar[bool] = True

    type: Literal["brightness"] = "brightness"
    """Mean luma in [0, 1]."""
    frames: FramesConfig = FramesConfig(policy="all")
    """The mean over all frames of a clip unless said otherwise."""


class OwnReward(RewardBase):
    """A reward that a recipe brings along."""

    path: ObjectPath
    """`module:object`, or the name of an installed entry point of the group verst.rewards."""
    batched: Flag = True
    """Called with all samples at once; false: once a sample, with one value of each kind, returning one number."""
    scope: Literal["sample", "group"] = "sample"
    """group: called once with all samples of one prompt in a rollout, in order, when the last of them is there."""
    independent_rows: Flag = False
    """A sample's score never depends on what else is in the call, not even by rounding."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of the class when it is made."""


class PythonReward(OwnReward):
    type: Literal["python"] = "python"
    """A function called with the samples' media and prompts that returns one number a sample, or a class with such a
    method `score`. Parameters called metadata, fps, audio or sample_rate get these; one called batch gets all in one
    record."""


class LatentReward(OwnReward):
    sees_latents: ClassVar[bool] = True

    type: Literal["latent"] = "latent"
    """As python, with the final latents (stream -> tensor) in the place of media. Parameters called metadata or fps get
    these. Where every reward of a sample is of this type, nothing is decoded."""


class SharpnessReward(ImageRewardBase):
    row_independent: ClassVar[bool] = True

    type: Literal["sharpness"] = "sharpness"
    """Mean absolute luma difference of neighbouring pixels, in [0, 1]."""


class ContrastReward(ImageRewardBase):
    row_independent: ClassVar[bool] = True

    type: Literal["contrast"] = "contrast"
    """Twice the standard deviation of luma over the pixels, in [0, 1]."""


class DiversityReward(RewardBase):
    group_wise: ClassVar[bool] = True

    type: Literal["diversity"] = "diversity"
    """Mean difference between a sample's thumbnail (16 x 16, of a clip's middle frame) and the others' of its group, in
    [0, 1]."""


EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Name of an environment variable: secrets never stand in a recipe."""
Url = Annotated[str, Field(pattern=r"^https?://\S+$")]


class HttpReward(RewardBase):
    type: Literal["http"] = "http"
    url: Url
    """A batch of samples is POSTed there; docs/rewards.md has the protocol."""
    format: Literal["json_png", "json_npy", "msgpack"] = "json_png"
    """Body of the request: JSON with base64 of PNG files or of one .npy file, or msgpack with .npy bytes."""
    headers_env: dict[str, EnvName] = Field(default_factory=dict)
    """Header -> environment variable that holds its value, e.g. {Authorization = "JUDGE_AUTH"}."""
    frames: FramesConfig | None = None
    """Send single frames of a clip as samples of their own and reduce their scores; left out: send clips whole."""


class OpenaiReward(RewardBase):
    row_independent: ClassVar[bool] = True

    type: Literal["openai"] = "openai"
    base_url: Url
    """Of an OpenAI-compatible service, e.g. "http://127.0.0.1:8000/v1"; `/chat/completions` is added."""
    model: str
    """The judge's name at the service."""
    rubric: Path
    """Text file: what the judge is asked, with {prompt} where the sample's prompt goes."""
    api_key_env: EnvName | None = None
    """Environment variable that holds the key; left out: no key is sent."""
    score_range: tuple[Number, Number] = (0.0, 10.0)
    """Lowest and highest score the rubric asks for; mapped to 0 and 1. An answer outside is a failure."""
    structured: Flag = True
    """Ask for JSON {"reason", "score"} by a schema (response_format); false: the whole answer must be one number."""
    frames: FrameChoice = FrameChoice(policy="uniform")
    """Frames of a clip that the judge sees, in one request."""
    concurrency: PositiveInt = 8
    """Requests at a time of one worker; there is one request a sample."""
    request_timeout_s: PositiveFloat = 60.0
    """Seconds one request may take; `timeout_s` is for all samples of a call."""
    max_tokens: PositiveInt = 512
    """Length of an answer."""
    temperature: NonNegativeFloat = 0.0
    """0 = the judge's likeliest answer."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, e.g. {seed = 1}."""

    @model_validator(mode="after")
    def _rules(self) -> OpenaiReward:
        low, high = self.score_range
        if not low < high:
            raise ConfigError(f"rewards.score_range = [{low:g}, {high:g}] must go from the lowest to the highest score")
        if self.request_timeout_s > self.timeout_s:
            raise ConfigError(
                f"rewards.request_timeout_s = {self.request_timeout_s:g} is more than rewards.timeout_s = {self.timeout_s:g}, "
                "the time for all samples of a call; raise that, or lower it"
            )
        return self


class ModelReward(RewardBase):
    """A frozen model from a local folder."""

    path: Annotated[str, Field(min_length=1)]
    """Folder with the checkpoint in the transformers layout; nothing is downloaded. docs/rewards.md says which files."""
    dtype: DType = "float32"
    """Of the model's weights and activations; normalisation and heads stay float32."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """cpu, cuda or cuda:N, as the reward's process sees them."""
    batch_size: PositiveInt = 8
    """Most samples of one forward."""


class PromptReward(ModelReward):
    """A frozen model that reads the prompt."""

    long_prompts: Literal["refuse", "truncate"] = "refuse"
    """A prompt longer than the text encoder takes stops the run before it starts, or is cut and reported."""


class ClipScoreReward(ImageRewardBase, PromptReward):
    type: Literal["clip_score"] = "clip_score"
    scale: PositiveFloat = 1.0
    """Factor of the cosine; 100 is common in reports."""


class PickScoreReward(ImageRewardBase, PromptReward):
    type: Literal["pick_score"] = "pick_score"
    normalise: Flag = True
    """Divide by 26, which brings good images near 1."""


class HpsV2Reward(ImageRewardBase, PromptReward):
    type: Literal["hps_v2"] = "hps_v2"
    checkpoint: str | None = None
    """File of the published open_clip state dict (.pt or .safetensors): takes the place of the folder's weights."""
    scale: PositiveFloat = 1.0
    """Factor of the cosine; 100 is common in reports."""


class HpsV3Reward(ImageRewardBase, ModelReward):
    type: Literal["hps_v3"] = "hps_v3"
    dtype: DType = "bfloat16"
    """Of the Qwen2-VL backbone; the published weights are bfloat16, and its rating head runs in float32."""


class ImageRewardReward(ImageRewardBase, PromptReward):
    type: Literal["image_reward"] = "image_reward"


class AestheticReward(ImageRewardBase, ModelReward):
    type: Literal["aesthetic"] = "aesthetic"
    head: Annotated[str, Field(min_length=1)]
    """File of the regression's weights (.pth or .safetensors)."""
    normalise: Flag = False
    """Divide the rating by 10."""


class GenEvalReward(ImageRewardBase, ModelReward):
    type: Literal["geneval"] = "geneval"
    clip: Annotated[str, Field(min_length=1)]
    """Folder of the CLIP that names colours; `path` is the detector's."""
    rule: Literal["strict", "soft"] = "soft"
    """strict: GenEval's own 0 or 1; soft: mean of partial credits."""


class ClapReward(PromptReward):
    type: Literal["clap"] = "clap"
    scale: PositiveFloat = 1.0
    """Factor of the cosine."""


class AvSyncReward(RewardBase):
    row_independent: ClassVar[bool] = True

    type: Literal["av_sync"] = "av_sync"
    tolerance_s: PositiveFloat = 0.1
    """Seconds by which sound and picture may be apart and still count as together."""
    max_shift_s: PositiveFloat = 0.5
    """Largest shift that is compared, in seconds."""

    @model_validator(mode="after")
    def _shifts(self) -> AvSyncReward:
        if self.max_shift_s <= self.tolerance_s:
            raise ConfigError(
                f"rewards.max_shift_s = {self.max_shift_s:g} must be larger than rewards.tolerance_s = "
                f"{self.tolerance_s:g}: the score compares shifts within the tolerance with those beyond it"
            )
        return self


RewardConfig = Annotated[
    OcrReward
    | JpegSizeReward
    | BrightnessReward
    | SharpnessReward
    | ContrastReward
    | DiversityReward
    | HttpReward
    | OpenaiReward
    | PythonReward
    | LatentReward
    | ClipScoreReward
    | PickScoreReward
    | HpsV2Reward
    | HpsV3Reward
    | ImageRewardReward
    | AestheticReward
    | GenEvalReward
    | ClapReward
    | AvSyncReward,
    Field(discriminator="type"),
]


def reward_name(reward: RewardBase) -> str:
    """The reward's name in metrics."""
    return reward.name or reward.type


def is_group_wise(reward: RewardConfig) -> bool:
    return reward.group_wise or (isinstance(reward, OwnReward) and reward.scope == "group")


def rows_are_independent(reward: RewardConfig) -> bool:
    return reward.row_independent or (isinstance(reward, OwnReward) and reward.independent_rows)
