"""The repeated blocks of a transformer compiled by torch.compile: the same kernels in engine and trainer.

A compiled forward that keeps what a backward needs is another program than one that does not: other fusions, other last
bits. So an engine runs a block as the trainer does, with gradients asked for, and drops behind each block what the
backward would have needed. What stands between the blocks is not compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from verst.config.basis import CompileBackend

_RECOMPILATIONS = 128
"""Of one block's code: by kind of block, shape, with and without gradients, adapter on and off."""


def compile_blocks(
    model: nn.Module, blocks: Collection[str], *, backend: CompileBackend, cut: bool = False
) -> list[str]:
    """From now on every module whose class is named in `blocks` runs compiled; their names.

    Each shape is compiled when it first comes. cut: an engine's, which makes no backward. Raises
    torch._dynamo.exc.FailOnRecompileLimitHit rather than going on without: the kernels would be others.
    """
    if backend == "off":
        return []
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _RECOMPILATIONS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * _RECOMPILATIONS)
    config.fail_on_recompile_limit_hit = True
    if torch.are_deterministic_algorithms_enabled():
        # Else two processes may time the same reduction differently and add it up in another order.
        inductor: Any = torch._inductor.config
        inductor.deterministic = True
    names = [name for name, child in model.named_modules() if type(child).__name__ in blocks]
    for name in names:
        block = model.get_submodule(name)
        compiled = torch.compile(block.forward, dynamic=False, backend=backend)
        block.forward = _Cut(compiled) if cut else compiled
    return names


class _Cut:
    """Stands in for a block's `forward`: what comes out asks for gradients where it did, and remembers nothing."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), output)


def asks_for_gradients(model: nn.Module, wanted: Callable[[str], bool]) -> None:
    """Of an engine's module: the parameters that the trainer trains ask for gradients here too."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted(name))
