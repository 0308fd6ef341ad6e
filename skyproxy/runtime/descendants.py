"""Processes that functions and jobs have started and left running: known by a variable that they inherited, wherever
they have gone since.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

MARK_VARIABLE = "SKYPROXY_WORKER_MARK"
"""Set for a worker process, and so for whatever is started there; a process group can be left, this mostly is not."""
JOB_MARK_VARIABLE = "SKYPROXY_JOB_MARK"
"""The same of a job."""
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


def leave_watcher(worker: int, variable: str, grace_seconds: float) -> None:
    """Leave a process behind that ends all with our mark, however the worker ends: the kernel tells it.

    This process must have one thread. It finds no child that it has not started, for the watcher is nobody's. The
    watcher has the mark, too, and ends with what has it.

    Args:
        worker: the process whose end is waited for; with the first one of a container, the kernel ends all others.
        variable: whose value, of this process, is the mark.
        grace_seconds: how long this process may still take to end by itself then.
    """
    mark = os.environ.get(variable)
    if mark is None or worker == 1:
        return
    try:
        ends = [os.pidfd_open(process) for process in (worker, os.getpid())]
    except (AttributeError, OSError):
        return  # another system than Linux, or a sandbox of one
    if child := os.fork():
        os.waitpid(child, 0)
        for end in ends:
            os.close(end)
        return
    try:
        if os.fork() == 0:
            _hold_nothing()
            for end, seconds in zip(ends, (None, grace_seconds), strict=True):
                select.select([end], [], [], seconds)
            end_marked(mark, variable)
    finally:
        os._exit(0)


def _hold_nothing() -> None:
    """Let go of the streams, the folder and the group of who began this process: signals for that are not for it."""
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)


def _processes() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return []


def _has(process: int, variable: bytes) -> bool:
    try:
        return variable in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # another user's, or gone
