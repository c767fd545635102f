"""A tensor's GPU memory as plain JSON that another process on the same GPU can open (CUDA IPC)."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from verst.errors import SyncError

_FIELDS = ("device", "handle", "nbytes", "offset", "counter", "counter_offset", "event", "event_sync")
"""What torch's UntypedStorage._share_cuda_ returns, in order."""


def share(tensor: Tensor) -> dict[str, Any]:
    """The handle of the tensor's memory, which must outlive every process that has opened it."""
    shared = dict(zip(_FIELDS, tensor.untyped_storage()._share_cuda_(), strict=True))
    return {
        key: base64.b64encode(value).decode() if isinstance(value, bytes) else value for key, value in shared.items()
    }


def open_shared(handle: dict[str, Any], device: torch.device) -> Tensor:
    """[nbytes] uint8 over the memory behind `handle`. Raises SyncError where it cannot be had."""
    if missing := [field for field in _FIELDS if field not in handle]:
        raise SyncError(f"the manifest's endpoint is no handle of GPU memory, it lacks {', '.join(missing)}")
    _, *rest = (
        base64.b64decode(value) if isinstance(value, str) else value for value in (handle[field] for field in _FIELDS)
    )
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        storage = torch.UntypedStorage._new_shared_cuda(index, *rest)
    except RuntimeError as error:
        raise SyncError(
            f"the trainer's GPU memory cannot be opened ({error}): the trainer has ended, or engine and trainer do "
            "not share a GPU; use sync.type = collective there. Nothing was changed."
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
