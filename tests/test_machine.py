"""What a run says of its machine, against psutil and a program that prints what nvidia-smi prints."""

import os
import time
from pathlib import Path

import psutil
import pytest

from verst.obs.machine import MachineLoad, gpu_readings

NVIDIA_SMI = """#!/bin/sh
echo "$@" > "$(dirname "$0")/asked"
echo $$ > "$(dirname "$0")/pid"
while true; do
  echo "0, 40, 1000"; echo "1, 0, [N/A]"
  echo "0, 60, 3000"; echo "1, 100, 500"
  sleep 0.05
done
"""


def test_a_line_of_nvidia_smi():
    assert gpu_readings("3, 25, 81559\n") == {"perf/gpu/3/utilisation": 0.25, "perf/gpu/3/memory_bytes": 81559 * 2**20}
    assert gpu_readings("0, [N/A], 7\n") == {"perf/gpu/0/memory_bytes": 7 * 2**20}
    assert gpu_readings("No devices were found\n") == {}


def test_readings_are_of_the_time_since_the_last_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    load, found = MachineLoad(every_s=0.05), {}
    load.start()
    while {"perf/gpu/1/memory_bytes", "perf/host/utilisation", "perf/host/memory_bytes"} - found.keys():
        time.sleep(0.05)
        found |= load.metrics()
    load.stop()
    assert found["perf/gpu/0/utilisation"] == pytest.approx(0.5, abs=0.11)
    assert found["perf/gpu/0/memory_bytes"] in (1000 * 2**20, 3000 * 2**20)
    assert 0 <= found["perf/host/utilisation"] <= 1
    assert found["perf/host/memory_bytes"] == pytest.approx(psutil.virtual_memory().used, rel=0.5)
    assert (tmp_path / "asked").read_text().split()[-2:] == ["-i", "0,1"]
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    load.metrics()
    assert load.metrics() == {}


def test_a_run_that_sees_no_gpu_asks_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    load = MachineLoad()
    load.start()
    load.stop()
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'No devices were found'; echo 'and again'; exit 6", "says: No devices were found"),
        ("echo 'cannot talk to the driver' >&2; exit 9", "says: cannot talk to the driver"),
        ("exit 9", "ended with exit code 9"),
    ],
)
def test_what_nvidia_smi_complains_of_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, words: str
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    load = MachineLoad(every_s=0.05)
    load.start()
    while not caplog.messages:
        time.sleep(0.02)
    load.stop()
    (said,) = caplog.messages
    assert said.startswith("nvidia-smi")
    assert words in said
    assert not any(name.startswith("perf/gpu") for name in load.metrics())
