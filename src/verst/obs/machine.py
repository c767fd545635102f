"""How busy the driver's machine is: its processors and memory, and its NVIDIA GPUs where it has some.

A thread looks while an iteration goes on. GPUs are read from one `nvidia-smi` that prints a line a second; it ends with
the thread, and where the driver is killed at its next line, which nobody reads.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Mapping

import psutil

from verst.obs.loop_lag import LoopLag

_log = logging.getLogger(__name__)
_QUERY = "index,utilization.gpu,memory.used"
_MIB = 2**20


class DriverLoad:
    """The driver's event loop, and the machine that it is on."""

    def __init__(self) -> None:
        self._loop, self._machine = LoopLag(), MachineLoad()

    def start(self) -> None:
        """On the running loop."""
        self._loop.start()
        self._machine.start()

    def stop(self) -> None:
        self._loop.stop()
        self._machine.stop()

    def metrics(self) -> dict[str, float]:
        """Since the last call of this."""
        return {**self._loop.metrics(), **self._machine.metrics()}


class MachineLoad:
    """Readings since the last call of `metrics`: of utilisation the mean, of memory the largest."""

    def __init__(self, *, every_s: float = 1.0) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._gpus: subprocess.Popen[str] | None = None
        self._readings: dict[str, list[float]] = defaultdict(list)

    def start(self) -> None:
        psutil.cpu_percent()  # the first call has nothing to compare with
        self._threads.append(threading.Thread(target=self._watch_host, name="machine-load", daemon=True))
        command = _command(os.environ)
        if command is not None:
            self._gpus = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            self._threads.append(threading.Thread(target=self._watch_gpus, name="gpu-load", daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._gpus is not None:
            self._gpus.terminate()
            self._gpus.wait()
        for thread in self._threads:
            thread.join()

    def metrics(self) -> dict[str, float]:
        """perf/host/... and perf/gpu/<i>/...; nothing of what was not read."""
        with self._lock:
            readings, self._readings = self._readings, defaultdict(list)
        return {
            name: max(values) if name.endswith("_bytes") else sum(values) / len(values)
            for name, values in readings.items()
        }

    def _watch_host(self) -> None:
        while not self._stop.wait(self._every_s):
            self._add({"perf/host/utilisation": psutil.cpu_percent() / 100})
            self._add({"perf/host/memory_bytes": float(psutil.virtual_memory().used)})

    def _watch_gpus(self) -> None:
        assert self._gpus is not None
        assert self._gpus.stdout is not None
        said = False
        with self._gpus.stdout as lines:
            for line in lines:
                self._add(gpu_readings(line))
                if not said and line.strip() and not _is_reading(line):
                    said = True
                    _log.warning("nvidia-smi, which perf/gpu/ is read from, says: %s", line.strip())
        code = self._gpus.wait()
        if code and not said and not self._stop.is_set():
            _log.warning("nvidia-smi, which perf/gpu/ is read from, ended with exit code %d", code)

    def _add(self, values: Mapping[str, float]) -> None:
        with self._lock:
            for name, value in values.items():
                self._readings[name].append(value)


def _is_reading(line: str) -> bool:
    return line.partition(",")[0].strip().isdecimal()


def gpu_readings(line: str) -> dict[str, float]:
    """Of `index, percent, MiB` as nvidia-smi prints it; what it does not know (`[N/A]`) is absent."""
    if not _is_reading(line):
        return {}
    index, *fields = (field.strip() for field in line.split(","))
    found = {}
    for name, text, unit in zip(("utilisation", "memory_bytes"), fields, (0.01, _MIB), strict=False):
        if text.isdecimal():
            found[f"perf/gpu/{index}/{name}"] = int(text) * unit
    return found


def _command(environment: Mapping[str, str]) -> list[str] | None:
    """None where there is no NVIDIA driver, or the run may see no GPU."""
    program, visible = shutil.which("nvidia-smi"), environment.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible in ("", "-1"):
        return None
    chosen = [] if visible is None else ["-i", visible]
    return [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-l", "1", *chosen]
