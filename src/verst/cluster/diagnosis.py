"""Why a process has ended, as far as its last words, its exit and the kernel's counters tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_SAID: tuple[tuple[str, str], ...] = (
    (
        r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "out of GPU memory: smaller rollout.microgroup_size or trainer.tile_size, trainer.offload, or cluster.sleep; "
        "`verst plan --memory` says what fits",
    ),
    (r"\bMemoryError\b|std::bad_alloc|Cannot allocate memory", "out of host memory"),
    (r"(ModuleNotFoundError|ImportError): (?P<what>.*)", "an import failed: {what}"),
    (r"No space left on device", "a disk is full"),
    (r"Segmentation fault|SIGSEGV", "crashed in native code (segmentation fault)"),
    (r"Bus error|SIGBUS", "a mapped file or shared memory went away or did not fit (bus error)"),
    (r"CUDA error: (?P<what>.*)", "the GPU failed: {what}"),
    (r"NCCL (error|WARN)|ncclSystemError|ncclInternalError", "NCCL failed between GPUs"),
    (r"Too many open files", "too many open files (ulimit -n)"),
    (r"SGLang's server at \S+ is gone", "the SGLang server behind it ended; its log is in the run folder, logs/"),
)
"""What a process or its log says -> what it means; the first that is found."""
_LINES = 20


def likely_cause(reason: str, log: Sequence[str], *, kernel_kills: int = 0, unanswered: bool = False) -> str:
    """reason: what its end was seen by; log: its last lines; kernel_kills: of the out-of-memory killer since it started;
    unanswered: it was ended from here because it made no progress."""
    if unanswered:
        return "it hung: stopped from outside, waiting for another process, or caught in a call that does not return"
    text = "\n".join((*log, reason))
    for pattern, meaning in _SAID:
        found = re.search(pattern, text)
        if found is not None:
            return meaning.format(**{key: value.strip() for key, value in found.groupdict().items()})
    if kernel_kills > 0 or "low on memory" in reason:
        return "killed because the machine ran out of memory (kernel or Ray)"
    errors = [line.strip() for line in log if re.match(r"\s*[\w.]+(Error|Exception)\b", line)]
    if errors:
        return f"it raised {errors[-1]}"
    return "killed by a signal from outside (SIGKILL), for it said nothing"


def last_lines(path: Path) -> list[str]:
    """Of a log; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 2**10))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip() and not line.startswith(":")][-_LINES:]


def kernel_kills() -> int:
    """Processes that the kernel has killed for memory so far: in this control group, else on this machine."""
    for path, key in ((Path("/sys/fs/cgroup/memory.events"), "oom_kill"), (Path("/proc/vmstat"), "oom_kill")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0
