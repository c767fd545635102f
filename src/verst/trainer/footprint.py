"""How many bytes a tile needs, from shapes: the family's own forward and backward on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verst.families.skeleton import Skeletons
from verst.trainer.live_bytes import LiveBytes, fused_attention
from verst.types import Conditioning, Latents


@dataclass(frozen=True, kw_only=True)
class TileBytes:
    """Beside weights. Gradients of the weights are counted as they come, where `held` says so."""

    saved: int
    """Alive between forward and backward: what autograd keeps."""
    peak: int
    """Most that is alive at any moment of forward and backward."""


def trace_tile(
    velocity: Callable[[], Latents],
    parameters: list[nn.Parameter],
    *,
    skeletons: Skeletons | None = None,
    fused: bool = False,
    held: Callable[[Tensor], Tensor | None] | None = None,
    between: Callable[[], object] | None = None,
    granule: int = 512,
) -> TileBytes:
    """One forward, the mean square of its velocity, one backward.

    skeletons: of a module of shapes; without, the tensors are real. held: a parameter's gradient -> what is kept of it
    (its shard, in another dtype; None: nothing more than there is already); unset = the gradient itself. between: runs
    after the forward, as a reference's forward does in a loss.
    """
    live = LiveBytes(granule=granule)
    kept: list[Tensor] = []
    hooks = [p.register_post_accumulate_grad_hook(_replacing(held, kept)) for p in parameters if held is not None]
    inside: AbstractContextManager[object] = nullcontext() if skeletons is None else skeletons.mode
    attention: AbstractContextManager[object] = fused_attention() if fused else nullcontext()
    with ExitStack() as stack:
        stack.enter_context(attention)
        if skeletons is not None:
            stack.enter_context(_watching(skeletons, live))
        for hook in hooks:
            stack.callback(hook.remove)
        with live:
            loss = torch.stack([v.pow(2).mean() for v in velocity().values()]).sum()
            saved = live.now
            if between is not None:
                between()
        with inside, live:
            loss.backward()
    for p in parameters:
        p.grad = None
    return TileBytes(saved=saved, peak=live.peak)


def trace_forward(run: Callable[[], object], *, skeletons: Skeletons, fused: bool = False) -> int:
    """Peak bytes of a forward without gradients, beside weights."""
    live = LiveBytes()
    attention: AbstractContextManager[object] = fused_attention() if fused else nullcontext()
    with attention, _watching(skeletons, live), torch.no_grad(), live:
        run()
    return live.peak


@contextmanager
def _watching(skeletons: Skeletons, live: LiveBytes) -> Iterator[None]:
    before = skeletons.watch, skeletons.taken
    skeletons.watch, skeletons.taken = live, live.stand_in
    try:
        yield
    finally:
        skeletons.watch, skeletons.taken = before


def _replacing(held: Callable[[Tensor], Tensor | None], kept: list[Tensor]) -> Callable[[Tensor], None]:
    def replace(p: Tensor) -> None:
        assert p.grad is not None
        value = held(p.grad)
        p.grad = None
        if value is not None:
            kept.append(value)

    return replace


def inputs_of(
    shapes: dict[str, tuple[int, ...]], *, rows: int, conditioning: Conditioning
) -> tuple[Latents, dict[str, Tensor], Conditioning]:
    """Latents, sigmas and conditioning of `rows` rows; conditioning: of one."""
    latents = {name: torch.zeros(rows, *shape) for name, shape in shapes.items()}
    sigmas = {name: torch.full((rows,), 0.5) for name in shapes}
    return latents, sigmas, conditioning.rows(torch.zeros(rows, dtype=torch.int64))
