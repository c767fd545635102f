"""What a trainer keeps in host memory, and brings to the device for as long as it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_PART_BYTES = 2**30
"""Of the trained parameters whose optimizer state is on the device at a time."""


def to_host(value: Tensor) -> Tensor:
    """A copy in host memory, pinned where there is a GPU; of a shard, this rank's part."""
    host = value.detach().to("cpu", copy=True)
    if torch.cuda.is_available():
        if isinstance(host, DTensor):
            host._local_tensor = host._local_tensor.pin_memory()
        else:
            host = host.pin_memory()
    return host


class HostOptimizer:
    """Takes the steps of an optimizer whose state lies on the host.

    State of a part of the parameters at a time is brought to the device, stepped there by the optimizer itself, and
    written back: the same kernels and the same bits as with all of it on the device, for four copies of each parameter
    over the bus. For optimizers that treat each parameter by itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, part_bytes: int = _PART_BYTES) -> None:
        """Moves the state that is there."""
        self._optimizer = optimizer
        self._part_bytes = part_bytes
        for state in optimizer.state.values():
            for name, value in state.items():
                if _is_large(value):
                    state[name] = to_host(value)

    def step(self) -> None:
        for part in self._parts():
            with self._only(part), self._on_device(part):
                self._optimizer.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # Who reads the host's copies next does not wait for the device.

    def _parts(self) -> list[list[Tensor]]:
        parts: list[list[Tensor]] = []
        room = 0
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                size = p.numel() * p.element_size()
                if size > room:
                    parts.append([])
                    room = self._part_bytes
                parts[-1].append(p)
                room -= size
        return parts

    @contextmanager
    def _only(self, part: list[Tensor]) -> Iterator[None]:
        """The optimizer sees these parameters alone."""
        groups, ids = self._optimizer.param_groups, {id(p) for p in part}
        whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in ids]
        try:
            yield
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    @contextmanager
    def _on_device(self, part: list[Tensor]) -> Iterator[None]:
        host: list[tuple[dict[str, Any], str, Tensor]] = []
        for p in part:
            state = self._optimizer.state[p]
            for name, value in list(state.items()):
                if _is_large(value):
                    host.append((state, name, value))
                    state[name] = value.to(p.device, copy=True, non_blocking=True)
        try:
            yield
        finally:
            for state, name, value in host:
                value.copy_(state[name], non_blocking=True)
                state[name] = value


def _is_large(value: Any) -> bool:
    """Not a count of steps, which optimizers keep on the host anyway."""
    return isinstance(value, Tensor) and value.ndim > 0
