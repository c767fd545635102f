"""The live policy and its reference, both through the family's one forward."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from verst.config import sections as s
from verst.families.base import Family
from verst.flow import transitions
from verst.flow.transitions import StepDistribution, Transition
from verst.trainer.core import Ema
from verst.trainer.pairs import Tile
from verst.trainer.parallel import shard
from verst.weights.lora import adaptable

Reference = AbstractContextManager[nn.Module]


def step_distribution(
    transformer: nn.Module,
    tile: Tile,
    *,
    family: Family,
    transition: Transition,
    guidance_scale: float,
    dtype: torch.dtype,
) -> dict[str, StepDistribution]:
    """stream -> distribution of the next latent of each pair: the engine's own step, with gradients."""
    velocity = family.velocity(
        transformer, tile.latents, tile.sigmas, tile.conditioning, guidance_scale=guidance_scale, dtype=dtype
    )
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


def joint_log_prob(
    steps: Mapping[str, StepDistribution], tile: Tile, *, reduction: transitions.LogProbReduction = "mean"
) -> dict[str, Tensor]:
    """stream -> [B] log-prob of the stored next latents, reduced as the engine did it."""
    return {
        name: transitions.gaussian_log_prob(tile.next_latents[name], step.mean, step.std, reduction=reduction)
        for name, step in steps.items()
    }


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

    def active(self) -> Reference:
        """The reference module; what it does is only valid inside the block, and without gradients."""
        if self._frozen is not None:
            return nullcontext(self._frozen)
        if isinstance(self._config, s.EmaReference):
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


def frozen_copy(
    module: nn.Module, *, blocks: tuple[str, ...], mesh: DeviceMesh, compute_dtype: torch.dtype
) -> nn.Module:
    """A sharded copy of the weights as they are now, without gradients. Called before `module` is sharded."""
    copied = copy.deepcopy(module).requires_grad_(False).eval()
    shard(copied, blocks=blocks, mesh=mesh, compute_dtype=compute_dtype)
    return copied
