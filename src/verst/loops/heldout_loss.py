"""Numbers of held-out items at fixed noise and noise levels: two readings differ by the weights alone."""

from __future__ import annotations

import torch
from torch import Tensor

from verst.config.data import FilesData
from verst.config.supervised import SftRecipe
from verst.data.dataset import FileDataset
from verst.families import Components
from verst.flow.noise import derive_seed
from verst.loops.sft_data import Batch
from verst.loops.sft_loss import SupervisedLoss, in_order
from verst.obs.waiting import Tell, nobody


class HeldOutLoss:
    """Every item at `data.heldout_sigmas` evenly spaced noise levels, in the middle of as many parts of [0, 1]."""

    def __init__(self, components: Components, data: FileDataset, recipe: SftRecipe, *, tell: Tell = nobody) -> None:
        """Encodes the items once. Raises DataError where none can be used."""
        assert isinstance(recipe.data, FilesData)
        self._num_sigmas = recipe.data.heldout_sigmas
        self._batches: list[Batch] = []

        def on_item(done: int, total: int) -> None:
            tell("encoding held-out items", done=done, total=total)

        for number, found in enumerate(data.heldout(recipe.trainer.tile_size, on_item=on_item)):
            generator = torch.Generator().manual_seed(derive_seed(recipe.eval.seed, "heldout loss", number))
            captions = [item.caption for item in found.items]
            eps = {k: torch.randn(x.shape, generator=generator).to(x.device) for k, x in found.x0[0].items()}
            batch = Batch(
                captions=captions,
                x0=found.x0,
                eps=eps,
                sigmas={},
                geometry=found.geometry,
                rows=None if recipe.trainer.train_text_encoders else data.condition(found, captions),
            )
            self._batches.append(batch)

    def evaluate(self, loss: SupervisedLoss) -> dict[str, float]:
        """Means over items and noise levels; of preferences also the share of pairs in the right order.

        A pair's margin is the mean over the noise levels; a margin of 0, as before the first step, is half right.
        """
        values: dict[str, list[Tensor]] = {}
        for batch in self._batches:
            levels = [loss.measure(_at(batch, (i + 0.5) / self._num_sigmas)) for i in range(self._num_sigmas)]
            for name in levels[0]:
                values.setdefault(name, []).append(torch.stack([level[name] for level in levels]).mean(dim=0))
        joined = {name: torch.cat(parts).double() for name, parts in values.items()}
        metrics = {f"eval/{name}": float(value.mean()) for name, value in joined.items()}
        if "preference_margin" in joined:
            metrics["eval/preference_accuracy"] = float(in_order(joined["preference_margin"]).mean())
        return metrics


def _at(batch: Batch, sigma: float) -> Batch:
    some = next(iter(batch.eps.values()))
    level = torch.full((len(batch.captions),), sigma, device=some.device)
    return Batch(
        captions=batch.captions,
        x0=batch.x0,
        eps=batch.eps,
        sigmas=dict.fromkeys(batch.eps, level),
        geometry=batch.geometry,
        rows=batch.rows,
    )
