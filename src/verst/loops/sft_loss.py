"""What a supervised algorithm does with a batch: one class each, chosen by the recipe's algorithm section."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from verst.algorithms.dpo import DpoLoss, dpo_loss
from verst.algorithms.sft import min_snr_weight, noised, velocity_loss
from verst.config import sections as s
from verst.config.supervised import DpoOfflineConfig, SftConfig, SftRecipe
from verst.families import Components
from verst.loops.forward import velocity
from verst.loops.sft_data import Batch
from verst.trainer.core import TileLoss, Trainer
from verst.trainer.policies import ReferencePolicy
from verst.trainer.rl import DTYPES
from verst.types import Conditioning, Latents

Closure = Callable[[], TileLoss]
_NUM_SIGMA_BUCKETS = 4
"""The loss is also reported by quarter of the noise level: the quarters differ in size, and a mean hides which moves."""


class SupervisedLoss(Protocol):
    def tiles(self, batch: Batch) -> list[Closure]:
        """Closures over `trainer.tile_size` samples each, whose losses add up to the batch's mean."""

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        """Held-out numbers of each sample ([B] each), without gradients; names as in docs/metrics.md after `eval/`."""


class Sft:
    """The squared velocity error."""

    def __init__(self, recipe: SftRecipe, components: Components, trainer: Trainer) -> None:
        del trainer
        assert isinstance(recipe.algorithm, SftConfig)
        self._recipe, self._config, self._components = recipe, recipe.algorithm, components

    def tiles(self, batch: Batch) -> list[Closure]:
        return [functools.partial(self._tile, batch, rows) for rows in row_slices(batch, self._recipe)]

    def _tile(self, batch: Batch, rows: slice) -> TileLoss:
        """The loss is the mean over streams and samples, times these rows' share of the batch."""
        errors = self._errors(batch, rows)
        first = next(iter(batch.sigmas))
        per_sample = torch.stack(list(errors.values())).mean(dim=0)
        sums = by_sigma(per_sample, batch.sigmas[first][rows])
        if len(errors) > 1:
            sums |= {f"mean/{stream}": error.detach().sum() / len(batch.captions) for stream, error in errors.items()}
        return TileLoss(loss=per_sample.sum() / len(batch.captions), sums=sums)

    def _errors(self, batch: Batch, rows: slice) -> dict[str, Tensor]:
        """stream -> [B], weighted."""
        config, weights = self._config, plain_weights(self._config.stream_weights)
        x0 = batch.x0[0]
        v = forward(self._components, self._components.transformer, batch, rows, x0, self._recipe)
        errors = {}
        for stream in x0:
            error = velocity_loss(v[stream], x0[stream][rows], batch.eps[stream][rows])
            if config.weighting == "min_snr":
                error = error * min_snr_weight(batch.sigmas[stream][rows], config.min_snr_gamma)
            errors[stream] = error * weights[stream] if stream in weights else error
        return errors

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, Tensor]:
        """The error that a step would train on, so that weights and streams count as they do there."""
        parts = [
            torch.stack(list(self._errors(batch, rows).values())).mean(dim=0)
            for rows in row_slices(batch, self._recipe)
        ]
        return {"heldout_loss": torch.cat(parts)}


class DpoOffline:
    """Diffusion-DPO on recorded pairs, against the base model."""

    def __init__(self, recipe: SftRecipe, components: Components, trainer: Trainer) -> None:
        """Call before a checkpoint is loaded: a frozen reference is the model as it is now."""
        assert isinstance(recipe.algorithm, DpoOfflineConfig)
        self._recipe, self._config, self._components = recipe, recipe.algorithm, components
        frozen = None
        if isinstance(self._config.reference, s.FrozenReference):
            frozen = copy.deepcopy(components.transformer).requires_grad_(False).eval()
        self._reference = ReferencePolicy(
            self._config.reference, components.transformer, named=trainer.named, ema=None, frozen=frozen
        )

    def tiles(self, batch: Batch) -> list[Closure]:
        return [functools.partial(self._tile, batch, rows) for rows in row_slices(batch, self._recipe)]

    def _tile(self, batch: Batch, rows: slice) -> TileLoss:
        out, size = self._loss(batch, rows), len(batch.captions)
        sums = {
            "mean/margin": out.margin.detach().sum() / size,
            "mean/accuracy": in_order(out.margin.detach()).sum() / size,
        }
        return TileLoss(loss=out.loss.sum() / size, sums=sums)

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, Tensor]:
        parts = [self._loss(batch, rows) for rows in row_slices(batch, self._recipe)]
        return {
            "heldout_loss": torch.cat([part.loss for part in parts]),
            "preference_margin": torch.cat([part.margin for part in parts]),
        }

    def _loss(self, batch: Batch, rows: slice) -> DpoLoss:
        better, worse = batch.x0
        policy = self._both(self._components.transformer, batch, rows)
        with torch.no_grad(), self._reference.active() as module:
            reference = self._both(module, batch, rows)
        size = {stream: x[0].numel() for stream, x in better.items()}
        targets = [
            {stream: batch.eps[stream][rows] - x[rows] for stream, x in side.items()} for side in (better, worse)
        ]
        join = functools.partial(_joined, weights=plain_weights(self._config.stream_weights), size=size)
        return dpo_loss(
            join(policy[0]), join(reference[0]), join(targets[0]),
            join(policy[1]), join(reference[1]), join(targets[1]),
            beta=self._config.beta,
        )  # fmt: skip

    def _both(self, module: nn.Module, batch: Batch, rows: slice) -> tuple[Latents, Latents]:
        """Velocities of both sides from one doubled batch."""
        better, worse = batch.x0
        pair = replace(
            batch,
            captions=[*batch.captions[rows], *batch.captions[rows]],
            eps={stream: torch.cat([x[rows], x[rows]]) for stream, x in batch.eps.items()},
            sigmas={stream: torch.cat([x[rows], x[rows]]) for stream, x in batch.sigmas.items()},
            rows=None if batch.rows is None else {k: torch.cat([x[rows], x[rows]]) for k, x in batch.rows.items()},
        )
        x0 = {stream: torch.cat([x[rows], worse[stream][rows]]) for stream, x in better.items()}
        v = forward(self._components, module, pair, slice(None), x0, self._recipe)
        halves = {stream: x.chunk(2) for stream, x in v.items()}
        return {k: half[0] for k, half in halves.items()}, {k: half[1] for k, half in halves.items()}


def _joined(x: Latents, *, weights: Mapping[str, float], size: Mapping[str, int]) -> Tensor:
    """[B, N], scaled so that the mean square over N is the weighted sum of the streams' own mean squares."""
    total = sum(size.values())
    parts = [value.flatten(1) * (weights.get(stream, 1.0) * total / size[stream]) ** 0.5 for stream, value in x.items()]
    return torch.cat(parts, dim=1)


def in_order(margin: Tensor) -> Tensor:
    """1 where the pair is in the right order; one half where neither is preferred, as before the first step."""
    return (torch.sign(margin) + 1) / 2


def plain_weights(weights: s.StreamWeights) -> dict[str, float]:
    return {str(stream): weight for stream, weight in weights.items()}


def row_slices(batch: Batch, recipe: SftRecipe) -> list[slice]:
    size = recipe.trainer.tile_size
    return [slice(start, start + size) for start in range(0, len(batch.captions), size)]


def forward(
    components: Components, module: nn.Module, batch: Batch, rows: slice, x0: Latents, recipe: SftRecipe
) -> Latents:
    """The unguided velocity at the batch's noise levels: stream -> [B, ...]."""
    if batch.rows is None:
        positive = components.family.encode_prompts(
            components,
            batch.captions[rows],
            max_sequence_length=recipe.model.max_sequence_length,
            geometry=batch.geometry,
        )
    else:
        positive = {name: value[rows] for name, value in batch.rows.items()}
    x = {stream: noised(x0[stream][rows], batch.eps[stream][rows], batch.sigmas[stream][rows]) for stream in x0}
    return velocity(
        components,
        module,
        x,
        {stream: batch.sigmas[stream][rows] for stream in x0},
        Conditioning(positive=positive, negative=None, geometry=batch.geometry),
        guidance_scale=1.0,
        dtype=DTYPES[recipe.model.dtype],
    )


def by_sigma(per_sample: Tensor, sigma: Tensor) -> dict[str, Tensor]:
    """`sum/sigma_i` and `num/sigma_i`: loss and count of the samples in each quarter of [0, 1]."""
    bucket = (sigma * _NUM_SIGMA_BUCKETS).long().clamp(max=_NUM_SIGMA_BUCKETS - 1)
    sums = {}
    for index in range(_NUM_SIGMA_BUCKETS):
        inside = (bucket == index).float()
        sums[f"sum/sigma_{index}"] = (per_sample.detach() * inside).sum()
        sums[f"num/sigma_{index}"] = inside.sum()
    return sums


LOSSES: dict[type[s.Section], Callable[[Any, Components, Trainer], SupervisedLoss]] = {
    SftConfig: Sft,
    DpoOfflineConfig: DpoOffline,
}
"""Recipe section -> loss."""
