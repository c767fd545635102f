"""Three hooks around a denoise loop: prepare before sharding, init at its start, finalize at its end.

    rollout = prepare_rollout(options, streams)          # one controller a stream, on full shapes
    rollout.init(conditioning)                           # what the trainer will replay
    latents = denoise(velocity, latents, schedulers, transitions=rollout.transitions)
    result = rollout.finalize(latents, timesteps)        # gathered

With options None (a serving request) every hook does nothing and `transitions` is empty: the loop then is plain
sampling. A loop with an update of its own passes a builder of its own, and calls the controllers' `transition` itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from verst.errors import InvariantError
from verst.flow.controller import FlowRolloutController, RolloutOptions
from verst.flow.noise import DrawNoise
from verst.flow.scheduler import StepTransition
from verst.flow.shards import Shards
from verst.types import Conditioning, Latents, StreamTrajectory


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One latent stream of a request, as the loop is about to denoise it."""

    name: str
    sigmas: Tensor
    """[T+1] fp32, terminal 0; a grid of the stream's own."""
    latent_shape: tuple[int, ...]
    """[B, ...], full, before sharding."""
    noise: DrawNoise
    shards: Shards | None = None


@runtime_checkable
class BuildController(Protocol):
    """Makes the controller of one stream."""

    def __call__(self, stream: Stream, options: RolloutOptions) -> FlowRolloutController: ...


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """What a request's rollout left behind, latents where the loop computed; empty for a serving request."""

    trajectories: dict[str, list[StreamTrajectory]] = field(default_factory=dict)
    """stream -> one a sample."""
    debug: dict[str, dict[str, dict[int, Tensor]]] = field(default_factory=dict)
    """stream -> `noise`, `mean`, `std`, `model_output` -> step -> [B, ...]."""
    conditioning: Conditioning | None = None
    """As the loop got it; None where it was not asked for."""


def build_controller(stream: Stream, options: RolloutOptions) -> FlowRolloutController:
    """The controller of a loop that steps verst's scheduler."""
    return FlowRolloutController(
        options=options,
        sigmas=stream.sigmas,
        latent_shape=stream.latent_shape,
        noise=stream.noise,
        shards=stream.shards,
    )


class Rollout:
    """One request between the hooks; made by `prepare_rollout`, used for one loop."""

    def __init__(self, controllers: dict[str, FlowRolloutController], *, keep_conditioning: bool) -> None:
        self._controllers = controllers
        self._keep_conditioning = keep_conditioning
        self._conditioning: Conditioning | None = None

    @property
    def transitions(self) -> dict[str, StepTransition]:
        """stream -> what the loop passes to that stream's scheduler step; empty for a serving request."""
        return {name: controller.transition for name, controller in self._controllers.items()}

    @property
    def controllers(self) -> Mapping[str, FlowRolloutController]:
        """stream -> controller, until `finalize`."""
        return self._controllers

    def init(self, conditioning: Conditioning) -> None:
        """Take a copy of the conditioning rows of this request, before the loop can change them."""
        if self._keep_conditioning:
            negative = conditioning.negative
            self._conditioning = dataclasses.replace(
                conditioning,
                positive=_copied(conditioning.positive),
                negative=None if negative is None else _copied(negative),
            )

    def finalize(self, latents: Latents, timesteps: Mapping[str, Tensor]) -> RolloutResult:
        """Collect and release. latents: this rank's part after the last step; timesteps: stream -> [T] as fed.

        A collective where streams are sharded. Raises InvariantError when a stream or a step is missing.
        """
        controllers, self._controllers = self._controllers, {}
        missing = sorted(controllers.keys() - latents.keys())
        if missing:
            raise InvariantError(f"the loop ended without the streams {missing}")
        return RolloutResult(
            trajectories={
                name: controller.finalize(latents[name], timesteps=timesteps[name])
                for name, controller in controllers.items()
            },
            debug={name: controller.debug_tensors for name, controller in controllers.items()},
            conditioning=self._conditioning,
        )


def prepare_rollout(
    options: RolloutOptions | None, streams: Sequence[Stream], *, build: BuildController = build_controller
) -> Rollout:
    """Before sharding: one controller for each stream, in the family's order. options None = a serving request.

    Raises ConfigError for options that the streams' grids cannot carry out.
    """
    if options is None:
        return Rollout({}, keep_conditioning=False)
    controllers = {stream.name: build(stream, options) for stream in streams}
    return Rollout(controllers, keep_conditioning=options.keep_conditioning)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().cpu().clone() for name, t in tensors.items()}
