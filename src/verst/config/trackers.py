"""The table of trackers: who is told of metrics and pictures, and how many samples are kept."""

from __future__ import annotations

from typing import Literal

from verst.config.basis import Flag, NonNegativeInt, PositiveInt, Section


class WandbConfig(Section):
    project: str
    """Project that the run belongs to."""
    entity: str | None = None
    """Team or user; unset = the login's own."""
    mode: Literal["online", "offline"] = "online"
    """offline: into the run folder alone; `wandb sync` sends it later."""


class MlflowConfig(Section):
    experiment: str
    """Experiment that the run belongs to; made where there is none."""
    uri: str | None = None
    """Tracking server or database; unset = MLFLOW_TRACKING_URI, and without it the file mlflow.db beside the run folders."""


class TrackioConfig(Section):
    project: str
    """Project that the run belongs to, in trackio's files on this machine."""


class TrackerConfig(Section):
    tensorboard: Flag = True
    """Write TensorBoard event files into the run folder."""
    wandb: WandbConfig | None = None
    """Also send metrics and pictures to Weights & Biases; needs its package: pip install "verst[wandb]"."""
    mlflow: MlflowConfig | None = None
    """Also write metrics and pictures to MLflow; needs its packages: pip install "verst[mlflow]"."""
    trackio: TrackioConfig | None = None
    """Also write metrics and pictures to trackio; needs its package: pip install "verst[trackio]"."""
    samples_every: NonNegativeInt = 10
    """Iterations between those whose best and worst sample of each group are kept in samples/; 0 = none are."""
    sample_groups: PositiveInt = 16
    """Groups of a rollout of which they are kept, the first ones."""
    sample_iterations: PositiveInt = 100
    """Iterations of which samples/ holds samples, held-out and of rollouts each: evenly over the run, the newest among them."""
