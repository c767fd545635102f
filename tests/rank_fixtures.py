"""How a rank of a two-process test ends."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist


def leave_and_exit() -> None:
    """Wait for the other rank, leave the group and end the process at once.

    Sharded modules still hold the group when the interpreter tears down, and gloo's threads then abort the process now
    and then ("terminate called without an active exception"). What a rank found is in its files by now; a rank that
    failed never comes here.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
