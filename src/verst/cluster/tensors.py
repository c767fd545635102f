"""Tensors between processes of one host: those in shared blocks go as handles, and are mapped where they arrive.

Ray pickles what goes to an actor when the call is made, and what comes back when it returns. Whether the other side
can map the block is known to the caller alone, who says so for each call; an actor answers as it is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import ray.util
import torch

from verst.engine.blocks import TensorHandle, handle_of, open_tensor

_same_host: ContextVar[bool] = ContextVar("same_host", default=False)


def as_handles(*, always: bool = False) -> None:
    """Let this process send tensors as handles: always, or inside `to_same_host`. After Ray is connected."""

    def serialize(tensor: torch.Tensor) -> TensorHandle | tuple[Any, ...]:
        handle = handle_of(tensor) if always or _same_host.get() else None
        return tensor.__reduce_ex__(5) if handle is None else handle

    ray.util.register_serializer(torch.Tensor, serializer=serialize, deserializer=_deserialize)


@contextmanager
def to_same_host(is_same: bool) -> Iterator[None]:
    """What is sent inside goes to a process that can open this host's blocks, or to one that cannot."""
    token = _same_host.set(is_same)
    try:
        yield
    finally:
        _same_host.reset(token)


def _deserialize(sent: TensorHandle | tuple[Callable[..., torch.Tensor], tuple[Any, ...]]) -> torch.Tensor:
    if isinstance(sent, TensorHandle):
        return open_tensor(sent)
    rebuild, arguments = sent
    return rebuild(*arguments)
