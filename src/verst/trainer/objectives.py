"""What an RL algorithm does with tiles: one class each, chosen by the recipe's algorithm section.

An objective sees tiles and policies; the trainer sees losses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from verst.algorithms.flow_grpo import policy_loss
from verst.algorithms.nft import nft_loss, old_policy_decay
from verst.config import sections as s
from verst.config.recipe import RlRecipe
from verst.families.base import Family
from verst.flow import transitions
from verst.flow.controller import make_transition
from verst.trainer.core import Ema, StepMetrics, TileLoss, Trainer
from verst.trainer.pairs import Tile
from verst.trainer.policies import ReferencePolicy, joint_log_prob, step_distribution
from verst.types import Latents

Closure = Callable[[], TileLoss]


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The roles that an objective may ask for."""

    family: Family
    live: nn.Module
    core: Trainer
    reference: ReferencePolicy | None
    """None without a KL."""
    dtype: torch.dtype
    """Compute dtype of the forward."""


class Objective(Protocol):
    def closures(self, tiles: Sequence[Tile], num_pairs: int) -> list[Closure]:
        """One loss a tile; they add up to the mean over `num_pairs` pairs of all ranks."""

    def summary(self, steps: Sequence[tuple[StepMetrics, int]]) -> dict[str, float]:
        """Metrics (without the prefix `policy/`) of the optimizer steps on one rollout, each with its pairs."""

    def after_rollout(self) -> None:
        """Called once all optimizer steps on a rollout are taken."""

    def sampler(self) -> Mapping[str, Tensor] | None:
        """The weights that engines sample with; None = the live ones."""

    def tensors(self) -> dict[str, Tensor]:
        """What a resumed run needs besides the trainer's own state; loading writes into these in place."""


class FlowGrpo:
    """The clipped policy gradient on the recorded steps, with an optional KL to a reference."""

    def __init__(self, recipe: RlRecipe, policies: Policies) -> None:
        assert isinstance(recipe.algorithm, s.FlowGrpoConfig)
        self._config = recipe.algorithm
        self._policies = policies
        self._guidance_scale = recipe.sampling.guidance_scale
        self._reduction = recipe.sampling.log_prob_reduction
        self._transition = make_transition(recipe.sampling.transition.type, recipe.sampling.transition.eta)

    def closures(self, tiles: Sequence[Tile], num_pairs: int) -> list[Closure]:
        return [functools.partial(self._loss, tile, num_pairs) for tile in tiles]

    def _loss(self, tile: Tile, num_pairs: int) -> TileLoss:
        config = self._config
        steps = self._distribution(self._policies.live, tile)
        per_pair = torch.zeros_like(tile.weight)
        clipped, deviation, difference = per_pair.clone(), per_pair.clone(), per_pair.clone()
        kl = per_pair.clone() if self._policies.reference is None else self._kl(steps, tile)
        for name, log_prob in joint_log_prob(steps, tile, reduction=self._reduction).items():
            old = tile.old_log_probs[name]
            out = policy_loss(log_prob, old, tile.advantages, clip_low=config.clip_low, clip_high=config.clip_high)
            per_pair = per_pair + stream_weight(config, name) * out.loss
            clipped = torch.maximum(clipped, out.clipped)
            deviation = torch.maximum(deviation, (out.ratio.detach() - 1).abs())
            difference = torch.maximum(difference, (log_prob.detach() - old).abs())
        loss = ((per_pair + config.kl_beta * kl) * tile.weight).sum() / num_pairs
        return TileLoss(
            loss=loss,
            sums={"clipped": (clipped * tile.weight).sum(), "kl": (kl.detach() * tile.weight).sum()},
            maxima={
                "ratio_deviation": (deviation * tile.weight).max(),
                "log_prob_difference": (difference * tile.weight).max(),
            },
        )

    def _kl(self, steps: Mapping[str, transitions.StepDistribution], tile: Tile) -> Tensor:
        """[B] KL to the reference with the transition's own std, summed over streams; gradients in the policy only."""
        assert self._policies.reference is not None
        with torch.no_grad(), self._policies.reference.active() as module:
            reference = self._distribution(module, tile)
        total = torch.zeros_like(tile.weight)
        for name, step in steps.items():
            std = step.std
            if self._config.kl_form == "no_dt":
                dt = tile.next_sigmas[name] - tile.sigmas[name]
                std = std / transitions.per_row(torch.sqrt(-dt), step.mean)
            total = total + stream_weight(self._config, name) * transitions.gaussian_kl(
                step.mean, reference[name].mean, std
            )
        return total

    def _distribution(self, module: nn.Module, tile: Tile) -> dict[str, transitions.StepDistribution]:
        return step_distribution(
            module,
            tile,
            family=self._policies.family,
            transition=self._transition,
            guidance_scale=self._guidance_scale,
            dtype=self._policies.dtype,
        )

    def summary(self, steps: Sequence[tuple[StepMetrics, int]]) -> dict[str, float]:
        """ratio_max_deviation and log_prob_max_difference are of the first step: before any update."""
        first, pairs = steps[0][0], sum(n for _, n in steps)
        return {
            "ratio_max_deviation": first.maxima["ratio_deviation"],
            "log_prob_max_difference": first.maxima["log_prob_difference"],
            "clip_fraction": sum(m.sums["clipped"] for m, _ in steps) / pairs,
            "kl": sum(m.sums["kl"] for m, _ in steps) / pairs,
        }

    def after_rollout(self) -> None:
        return None

    def sampler(self) -> None:
        return None

    def tensors(self) -> dict[str, Tensor]:
        return {}


class Nft:
    """DiffusionNFT: the old policy samples, and follows the live one once a rollout."""

    def __init__(self, recipe: RlRecipe, policies: Policies) -> None:
        assert isinstance(recipe.algorithm, s.NftConfig)
        self._config = recipe.algorithm
        self._policies = policies
        self._old = Ema(policies.core.named, 0.0)
        self._rollouts = torch.zeros((), dtype=torch.int64)

    def closures(self, tiles: Sequence[Tile], num_pairs: int) -> list[Closure]:
        """The other policies' velocities of all tiles first, each with one exchange of weights."""
        with torch.no_grad():
            with self._old.applied(self._policies.core.named):
                old = [self._velocity(self._policies.live, tile) for tile in tiles]
            reference = self._policies.reference
            with nullcontext() if reference is None else reference.active() as module:
                anchors = [None if reference is None else self._velocity(module, tile) for tile in tiles]
        rows = zip(tiles, old, anchors, strict=True)
        return [functools.partial(self._loss, tile, v_old, v_ref, num_pairs) for tile, v_old, v_ref in rows]

    def _loss(self, tile: Tile, v_old: Latents, v_ref: Latents | None, num_pairs: int) -> TileLoss:
        config = self._config
        velocity = self._velocity(self._policies.live, tile)
        zero = torch.zeros_like(tile.weight)
        per_pair, positive, negative, kl, distance = zero, zero, zero, zero, zero
        for name, v in velocity.items():
            out = nft_loss(
                v,
                v_old[name],
                tile.latents[name],
                tile.next_latents[name],
                tile.sigmas[name],
                tile.advantages,
                beta=config.beta,
                advantage_clip=config.advantage_clip,
            )
            per_pair = per_pair + stream_weight(config, name) * out.loss
            positive, negative = positive + out.positive.detach(), negative + out.negative.detach()
            distance = distance + _mean_square(v.detach() - v_old[name])
            if v_ref is not None:
                kl = kl + stream_weight(config, name) * _mean_square(v - v_ref[name])
        loss = ((per_pair + config.kl_beta * kl) * tile.weight).sum() / num_pairs
        sums = {"positive_loss": positive, "negative_loss": negative, "kl": kl.detach(), "old_distance": distance}
        return TileLoss(loss=loss, sums={name: (value * tile.weight).sum() for name, value in sums.items()})

    def _velocity(self, module: nn.Module | None, tile: Tile) -> Latents:
        assert module is not None
        return self._policies.family.velocity(
            module, tile.latents, tile.sigmas, tile.conditioning, guidance_scale=1.0, dtype=self._policies.dtype
        )

    def summary(self, steps: Sequence[tuple[StepMetrics, int]]) -> dict[str, float]:
        pairs = sum(n for _, n in steps)
        return {name: sum(m.sums[name] for m, _ in steps) / pairs for name in steps[0][0].sums}

    def after_rollout(self) -> None:
        config = self._config
        decay = old_policy_decay(
            int(self._rollouts), flat=config.old_flat, ramp=config.old_ramp, largest=config.old_decay
        )
        self._old.decay = decay
        self._old.update(self._policies.core.named)
        self._rollouts += 1

    def sampler(self) -> Mapping[str, Tensor]:
        return self._old.shadow

    def tensors(self) -> dict[str, Tensor]:
        return {"old.rollouts": self._rollouts, **{f"old.{name}": value for name, value in self._old.shadow.items()}}


def stream_weight(config: s.FlowGrpoConfig | s.NftConfig, name: str) -> float:
    """Weight of one latent stream's loss and KL."""
    return {str(stream): weight for stream, weight in config.stream_weights.items()}.get(name, 1.0)


def _mean_square(x: Tensor) -> Tensor:
    """[B]"""
    return (x.flatten(1) ** 2).mean(dim=1)


OBJECTIVES: dict[type[s.Section], Callable[[Any, Policies], Objective]] = {
    s.FlowGrpoConfig: FlowGrpo,
    s.NftConfig: Nft,
}
"""Recipe section -> objective."""
