"""Processes that functions have started and left running: known by a variable that it inherited, wherever it has gone
since.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

MARK_VARIABLE = "SKYPROXY_WORKER_MARK"
"""Set for a worker process, and so for whatever is started there; a process group can be left, this mostly is not."""
_MAX_ROUNDS = 10


def end_marked(mark: str, variable: str = MARK_VARIABLE) -> None:
    """End all processes of this machine that were started with a mark, this one aside.

    Again and again, because they may start others meanwhile. On systems with /proc only.

    Args:
        mark: the variable's value.
        variable: whose; by default that of all that a worker starts.
    """
    wanted = f"{variable}={mark}".encode()
    for _ in range(_MAX_ROUNDS):
        found = [process for process in _processes() if _has(process, wanted)]
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        if not found:
            return


def _processes() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return []


def _has(process: int, variable: bytes) -> bool:
    try:
        return variable in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # another user's, or gone
