"""What `verst doctor` finds of the machine: torch and GPUs, disk, shared memory, open files, ports, compiler."""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import socket
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from verst.cli.doctor import Finding

GIB = 2**30
FEW_BYTES, TOO_FEW_BYTES = 20 * GIB, GIB
"""Of disk: checkpoints of a small LoRA run still fit into the first; the second does not hold one of them."""
RAY_STORE = 256 * 2**20
"""cluster.object_store_bytes unless a recipe says otherwise."""
FEW_FILES, TOO_FEW_FILES = 4096, 256
"""Open files: each answer that waits in shared memory is two."""


def machine_findings() -> list[Finding]:
    return [
        *torch_findings(),
        memory(),
        disk(Path.cwd(), shutil.disk_usage(Path.cwd()).free),
        shared_memory(_free(Path("/dev/shm"))),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        ports(),
        memfd(),
        compiler(os.environ),
    ]


def torch_findings() -> list[Finding]:
    """Imports torch, and asks the driver by nvidia-smi."""
    listed = nvidia_smi()
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        remedy = "install torch anew: https://pytorch.org/get-started/locally, the build of your driver's CUDA"
        return [Finding(name="torch", level="fail", text=f"cannot be imported: {_line(error)}", remedy=remedy)]
    names, why = [], ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                torch.zeros(1, device="cuda").add_(1).item()
                seen = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
                names = [f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" for gpu in seen]
        except (RuntimeError, AssertionError) as error:
            why = _line(error)
    # A driver that is too old torch only warns of.
    why = why or "".join(str(warning.message).splitlines()[0] for warning in said[:1])
    found = gpus(torch.version.cuda, names, listed, hidden=_hidden(os.environ), why=why)
    if not names:
        return [found]
    backends = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return [found, nccl(".".join(map(str, torch.cuda.nccl.version())) if backends else None, len(names))]


def gpus(build: str | None, usable: Sequence[str], listed: Sequence[str], *, hidden: bool, why: str) -> Finding:
    """build: the CUDA of torch's build. usable: GPUs torch computes on. listed: `name, driver` by nvidia-smi.

    hidden: CUDA_VISIBLE_DEVICES is empty. why: what torch said where it could not use them.
    """
    driver = f", driver {listed[0].rpartition(', ')[2]}" if listed else ""
    if usable:
        return Finding(name="gpu", level="ok", text=f"{'; '.join(usable)}; CUDA {build}{driver}")
    if not listed:
        text = "none: runs compute on the processor, which is for the demo and for tests"
        if build is None:
            return Finding(name="gpu", level="ok", text=text)
        remedy = "in a container: start it with its GPUs (docker --gpus all); else see that `nvidia-smi` runs"
        return Finding(name="gpu", level="warn", text=text, remedy=remedy)
    if hidden:
        text = f"{len(listed)} in this machine, but CUDA_VISIBLE_DEVICES is set and names none"
        return Finding(
            name="gpu", level="warn", text=text, remedy="unset CUDA_VISIBLE_DEVICES, or name the GPUs to use"
        )
    if build is None:
        remedy = "install torch's CUDA build: https://pytorch.org/get-started/locally"
        text = f"{len(listed)} in this machine{driver}, but this torch is built for processors alone"
        return Finding(name="gpu", level="fail", text=text, remedy=remedy)
    text = f"{len(listed)} in this machine{driver}, which torch (CUDA {build}) cannot use{': ' if why else ''}{why}"
    remedy = f"update the driver to one that knows CUDA {build}, or install torch for the CUDA that `nvidia-smi` prints"
    return Finding(name="gpu", level="fail", text=text, remedy=remedy)


def usable_gpus() -> int:
    """GPUs that torch computes on; 0 where it cannot be imported."""
    try:
        torch = importlib.import_module("torch")
        return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    except (ImportError, OSError, RuntimeError):
        return 0


def nccl(version: str | None, count: int) -> Finding:
    if version is not None:
        return Finding(name="nccl", level="ok", text=version)
    remedy = "install a torch with NCCL; one GPU does without"
    return Finding(name="nccl", level="fail" if count > 1 else "warn", text="torch has none", remedy=remedy)


def nvidia_smi() -> list[str]:
    """`name, driver version` of each GPU; none where the program is not there or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def memory() -> Finding:
    import psutil

    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    text = f"{free / GIB:.1f} GiB of {total / GIB:.1f} free, {os.cpu_count()} cores"
    if free < 2 * GIB:
        remedy = "end other programs: torch, Ray and one worker of each kind take about 2 GiB before any model"
        return Finding(name="memory", level="warn", text=text, remedy=remedy)
    return Finding(name="memory", level="ok", text=text)


def disk(folder: Path, free: int) -> Finding:
    text = f"{free / GIB:.1f} GiB free in {folder}"
    if free >= FEW_BYTES:
        return Finding(name="disk", level="ok", text=text)
    remedy = "make room, or set run.folder to a larger disk; checkpoint.keep and trackers.samples_every bound a run"
    return Finding(name="disk", level="warn" if free >= TOO_FEW_BYTES else "fail", text=text, remedy=remedy)


def shared_memory(free: int | None, needed: int = RAY_STORE) -> Finding:
    """free: bytes of /dev/shm, None where there is none. needed: the local Ray's object store."""
    if free is None:
        return Finding(name="/dev/shm", level="ok", text="this system has none; Ray keeps its objects in files")
    text = f"{free / GIB:.2f} GiB free"
    if free >= needed:
        return Finding(name="/dev/shm", level="ok", text=text)
    remedy = (
        "start the container with --shm-size=8g, or lower cluster.object_store_bytes: Ray then uses the disk, slowly"
    )
    return Finding(name="/dev/shm", level="warn", text=f"{text}, Ray's store is {needed / GIB:.2f} GiB", remedy=remedy)


def open_files(most: int, needed: int = FEW_FILES) -> Finding:
    """most: the hard limit, which a run raises its own to. needed: what a large rollout may take."""
    if most == resource.RLIM_INFINITY or most >= needed:
        shown = "any number" if most == resource.RLIM_INFINITY else str(most)
        return Finding(name="open files", level="ok", text=f"{shown} allowed")
    remedy = "raise the hard limit (`ulimit -Hn`, /etc/security/limits.conf, docker --ulimit nofile=65536)"
    return Finding(
        name="open files",
        level="warn" if most >= TOO_FEW_FILES else "fail",
        text=f"{most} allowed, a large rollout may hold {needed}",
        remedy=remedy,
    )


def ports(first: int = 0, count: int = 1, *, key: str = "engine.port") -> Finding:
    """Binds `count` ports of loopback from `first` on, one after the other; first 0: any free one. key: that says which."""
    taken = []
    for port in range(first, first + count) if first else [0]:
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError as error:
            taken.append(f"{port or 'any'} ({error.strerror})")
    if not taken:
        named = f"{first} to {first + count - 1} are free" if first else "loopback has free ones"
        return Finding(name="ports", level="ok", text=named)
    remedy = f"set {key} to another number, or 0 for any free one" if first else "allow programs to listen on 127.0.0.1"
    return Finding(name="ports", level="fail", text=f"cannot listen on 127.0.0.1: {', '.join(taken)}", remedy=remedy)


def memfd() -> Finding:
    try:
        os.close(os.memfd_create("verst-doctor"))
    except (AttributeError, OSError) as error:
        remedy = "none is needed: samples come over HTTP instead (rollout.transport), which takes more of the processor"
        return Finding(name="memfd", level="warn", text=f"this system has none: {_line(error)}", remedy=remedy)
    return Finding(name="memfd", level="ok", text="samples travel in shared memory")


def compiler(environment: Mapping[str, str], *, asked: bool = False) -> Finding:
    """asked: a recipe has model.compile = inductor."""
    for name in filter(None, (environment.get("CXX"), "g++", "clang++", "c++")):
        path = shutil.which(name, path=environment.get("PATH"))
        if path is not None:
            return Finding(name="c++", level="ok", text=path)
    remedy = 'install g++ or clang, or leave model.compile = "off"'
    text = "no compiler, which model.compile = inductor needs"
    return Finding(name="c++", level="fail" if asked else "warn", text=text, remedy=remedy)


def _hidden(environment: Mapping[str, str]) -> bool:
    return environment.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _line(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
