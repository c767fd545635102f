"""Activation checkpointing: what a repeated block keeps for its backward is its inputs, and it computes again from them.

Whole blocks rather than single products and attentions: torch's selective policy goes through a dispatch mode at every
operation, which a trainer that waits for its host pays for, and has to know the name of each attention kernel. A block is
also what FSDP2 gathers, and around what the exchange of tokens has its hooks: all of these stay outside of what is
computed again, so that a block's backward gathers its weights once and only attentions exchange a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verst.families.sequence import SequenceSplit


def recompute_blocks(
    model: nn.Module, blocks: Collection[str], *, every: int, split: SequenceSplit | None = None
) -> list[str]:
    """From now on every `every`-th module whose class is named in `blocks` computes its forward again in the backward.

    Returns their names. Call it before FSDP2 gives the blocks classes of its own. split: of this model, where its tokens
    are cut over ranks. The forward must draw no random numbers.
    """
    repeated = [(name, child) for name, child in model.named_modules() if type(child).__name__ in blocks]
    chosen = repeated[::every]
    for _, block in chosen:
        block.forward = _Recomputed(block.forward, split)
    return [name for name, _ in chosen]


class _Recomputed:
    """Stands in for a block's `forward`, inside of all its hooks."""

    def __init__(self, forward: Callable[..., Any], split: SequenceSplit | None) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._parameters = signature(forward)
        self._split = split

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        options: dict[str, Any] = {} if self._split is None else {"context_fn": self._split.remembered()}
        # By position: only so does torch keep them as tensors of the graph, which notices one that is written to.
        bound = self._parameters.bind(*args, **kwargs)
        return checkpoint(
            self._forward, *bound.args, use_reentrant=False, preserve_rng_state=False, **options, **bound.kwargs
        )
