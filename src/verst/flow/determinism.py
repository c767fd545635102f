"""The same bits again on a GPU: what torch must be told before its first kernel."""

from __future__ import annotations

import os

import torch


def make_deterministic(device: torch.device) -> None:
    """Choose kernels whose result does not depend on timing, in this process. A CPU computes so anyway.

    Engine and trainer call it alike, since the choice of an attention kernel changes the last bits: cuDNN's attention
    has no deterministic backward, so that neither side may take it, with gradients or without. From then on an operation
    that has no deterministic form raises RuntimeError and says its name.
    """
    if device.type != "cuda":
        return
    # cuBLAS reads it when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Reads of memory that nothing was written to would be a fault of ours, and filling all of it costs bandwidth.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)
