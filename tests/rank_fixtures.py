"""How the ranks of a test of several processes begin and end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist


def run_ranks(
    script: str, folder: Path, *, before: Sequence[str] = (), codes: Sequence[int] = (0, 0), timeout_s: float = 900
) -> None:
    """Run `script` once a rank, until all have ended, with these codes; what they say comes with a failure.

    Its arguments are those of `before`, the rank and `folder`.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, *before, str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(len(codes))
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == list(codes), "\n".join(outputs)


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
