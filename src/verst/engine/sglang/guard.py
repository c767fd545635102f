"""Ends a server with the process that wanted it, whatever killed that: a program of its own, without imports of ours.

python guard.py COMMAND...

Stands between the adapter and the server. When its input closes, because the adapter let go of it or is dead, the server
and all that it started are ended. It ends with the server's exit status.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_LOOK_S = 0.5
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def _end_with_guard() -> None:
    """The guard itself may be killed; Linux then ends the server, and SGLang's own workers end with that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Whether there was somebody to hear it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _end(server: subprocess.Popen[bytes]) -> None:
    """The session that was started for the server holds it and what it started, and nothing else."""
    _signal(server.pid, signal.SIGTERM)
    end = time.monotonic() + _GRACE_S
    while server.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    _signal(server.pid, signal.SIGKILL)
    server.wait()


def main(command: list[str]) -> int:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_guard)
    while server.poll() is None:
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if readable and not os.read(0, 4096):
            break
    _end(server)
    return server.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
