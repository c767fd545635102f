"""The live policy, the old one and the reference, all through the family's one forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import nn

from verst.algorithms.base import Role
from verst.algorithms.pairs import Tile
from verst.config import sections as s
from verst.flow import transitions
from verst.flow.transitions import StepDistribution, Transition
from verst.trainer.core import Ema
from verst.trainer.forward import Forward
from verst.types import Latents
from verst.weights.lora import adaptable

Reference = AbstractContextManager[nn.Module]


def step_distribution(
    transformer: nn.Module,
    tile: Tile,
    *,
    forward: Forward,
    transition: Transition,
) -> dict[str, StepDistribution]:
    """stream -> distribution of the next latent of each pair: the engine's own step, with gradients."""
    velocity = forward(transformer, tile.latents, tile.sigmas, tile.conditioning)
    return distribution_of(velocity, tile, transition)


def distribution_of(velocity: Latents, tile: Tile, transition: Transition) -> dict[str, StepDistribution]:
    """stream -> distribution of each pair's next latent under these velocities."""
    return {
        name: transition(
            x,
            velocity[name],
            sigma=transitions.per_row(tile.sigmas[name], x),
            next_sigma=transitions.per_row(tile.next_sigmas[name], x),
            first_sigma=tile.first_sigmas[name],
        )
        for name, x in tile.latents.items()
    }


class TrainerPolicies:
    """The policies of one trainer rank, as losses see them (`algorithms.base.Policies`).

    Policies that need an exchange of weights (the old one of its own, the average as a reference) are computed for all
    tiles of an optimizer step in one exchange, before it; so is the policy as it was at the start of a rollout, for the
    tiles of all steps but the first, where it is the live one. Those velocities are kept on the CPU.
    """

    def __init__(
        self,
        *,
        forward: Forward,
        live: nn.Module,
        named: Mapping[str, nn.Parameter],
        reference: ReferencePolicy | None,
        old: Ema | Literal["none", "start"],
        transition: Transition,
    ) -> None:
        """reference: None without one."""
        self._velocity = forward
        self._module = live
        self._named = named
        self._reference = reference
        self._old = old
        self._transition = transition
        self._tile: Tile | None = None
        self._now: dict[Role, Latents] = {}
        self._kept: dict[tuple[Role, int], Latents] = {}

    def velocity(self, tile: Tile, role: Role = "live") -> Latents:
        """See Policies.velocity."""
        if self._tile is not tile:
            self._tile, self._now = tile, {}
        if role not in self._now:
            self._now[role] = self._computed(tile, role)
        return self._now[role]

    def _computed(self, tile: Tile, role: Role) -> Latents:
        if role == "live":
            return self._forward(self._module, tile)
        kept = self._kept.get((role, id(tile)))
        if kept is not None:
            return {name: value.to(tile.weight.device) for name, value in kept.items()}
        if role == "old":
            assert self._old == "start", "the algorithm asks for an old policy that it did not declare"
            return {name: value.detach() for name, value in self.velocity(tile).items()}
        assert self._reference is not None, "the algorithm asks for a reference that its section did not declare"
        with torch.no_grad(), self._reference.active() as module:
            return self._forward(module, tile)

    def distribution(self, tile: Tile, role: Role = "live") -> dict[str, StepDistribution]:
        """See Policies.distribution."""
        return distribution_of(self.velocity(tile, role), tile, self._transition)

    def before_rollout(self, steps: Sequence[Sequence[Tile]]) -> None:
        """Called with the tiles of all optimizer steps of a rollout, before the first is taken."""
        self._kept.clear()
        if self._old == "start":
            self._keep("old", self._module, [tile for tiles in steps[1:] for tile in tiles])

    def before_step(self, tiles: Sequence[Tile]) -> None:
        """Called with the tiles of one optimizer step."""
        if isinstance(self._old, Ema):
            with self._old.applied(self._named):
                self._keep("old", self._module, tiles)
        if self._reference is not None and self._reference.moves_weights:
            with self._reference.active() as module:
                self._keep("reference", module, tiles)

    def after_tile(self) -> None:
        """The loss of a tile is made: drop what was computed for it."""
        self._tile, self._now = None, {}

    def after_step(self, tiles: Sequence[Tile]) -> None:
        """Drop what was kept for the tiles of a step."""
        for tile in tiles:
            self._kept.pop(("old", id(tile)), None)
            self._kept.pop(("reference", id(tile)), None)

    @torch.no_grad()
    def _keep(self, role: Role, module: nn.Module, tiles: Sequence[Tile]) -> None:
        # A tile that stands there twice goes through twice: ranks must make equally many forwards.
        for tile in tiles:
            velocity = self._forward(module, tile)
            self._kept[role, id(tile)] = {name: value.cpu() for name, value in velocity.items()}

    def _forward(self, module: nn.Module, tile: Tile) -> Latents:
        return self._velocity(module, tile.latents, tile.sigmas, tile.conditioning)


class ReferencePolicy:
    """What the KL is taken to: the base under a LoRA, a frozen copy, or the moving average of the policy."""

    def __init__(
        self,
        config: s.AdapterOffReference | s.FrozenReference | s.EmaReference,
        policy: nn.Module,
        *,
        named: Mapping[str, nn.Parameter],
        ema: Ema | None,
        frozen: nn.Module | None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._named = named
        self._ema = ema
        self._frozen = frozen

    @property
    def moves_weights(self) -> bool:
        """`active` puts other weights into the policy's module, which costs a copy of them."""
        return self._frozen is None and isinstance(self._config, s.EmaReference)

    def active(self) -> Reference:
        """The reference module; what it does is only valid inside the block, and without gradients."""
        if self._frozen is not None:
            return nullcontext(self._frozen)
        if self.moves_weights:
            return self._averaged()
        return self._adapter_off()

    @contextmanager
    def _averaged(self) -> Iterator[nn.Module]:
        assert self._ema is not None
        with self._ema.applied(self._named):
            yield self._policy

    @contextmanager
    def _adapter_off(self) -> Iterator[nn.Module]:
        models = adaptable(self._policy)
        for model in models:
            model.disable_adapters()
        try:
            yield self._policy
        finally:
            for model in models:
                model.enable_adapters()
