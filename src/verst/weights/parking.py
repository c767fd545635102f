"""Memory of tensors given back for a while. The tensors stay the same objects, so whoever refers to them goes on doing so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Parking:
    """`park` takes the memory of tensors away, `restore` gives it back.

    What is kept waits in host memory, pinned where there is a GPU; buffers there are made once and used again. On a CPU
    nothing is freed by that: its own memory is where it waits.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        """id of a tensor -> itself and its place on the host."""
        self._parked: list[tuple[Tensor, torch.Size, Tensor | None]] = []

    def park(self, kept: Sequence[Tensor], dropped: Sequence[Tensor] = ()) -> None:
        """dropped: come back with arbitrary values."""
        self._parked = [(tensor, tensor.shape, self._copy(tensor)) for tensor in kept]
        self._parked += [(tensor, tensor.shape, None) for tensor in dropped]
        _wait(kept)
        for tensor, _, _ in self._parked:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        for tensor, shape, host in self._parked:
            if host is not None and tensor.device.type == "cpu":
                tensor.data = host
                continue
            tensor.data = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            if host is not None:
                tensor.data.copy_(host, non_blocking=True)
        _wait([tensor for tensor, _, _ in self._parked])
        self._parked = []

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor.data
        if id(tensor) not in self._buffers:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._buffers[id(tensor)] = (tensor, buffer)
        host = self._buffers[id(tensor)][1]
        return host.copy_(tensor.data, non_blocking=True)


def _wait(tensors: Sequence[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)
