"""Settings of the kernel for a process of a worker: when it ends, who may look into it, what it may use. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 4, 15, 36  # of <linux/prctl.h>
_PR_SET_NO_NEW_PRIVS = 38
_OOM_SCORE = 600
"""Added to a session's badness: where memory ends, the kernel takes the largest session and not the supervisor."""


def are_sessions_separable() -> bool:
    """Return whether this system has what a process for each session needs; some sandboxes have only part of Linux."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("skyproxy-probe"))
    except OSError:
        return False
    return Path("/proc/self/task").is_dir()


def _prctl(option: int, value: int | bytes) -> None:
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    zero = ctypes.c_ulong(0)
    ctypes.CDLL(None, use_errno=True).prctl(option, argument, zero, zero, zero)


def end_with(parent: int) -> None:
    """From now on the kernel kills this process when its parent's thread ends; at once if the parent has ended.

    That thread is the one which began this process, or the main one of who adopted it. The kernel does it, for no
    thread of ours runs while native code holds the interpreter.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def hide_memory() -> None:
    """Processes of the same user can neither read this one's memory nor its first environment; no core is dumped."""
    _prctl(_PR_SET_DUMPABLE, 0)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def show_to_own_user() -> None:
    """Undo `hide_memory` where nobody else is of this user: what /proc has of this process is its own again."""
    _prctl(_PR_SET_DUMPABLE, 1)


def end_all_others_of_this_user() -> None:
    """End all processes that this user may end, at once: none of them can start another one meanwhile.

    Raises:
        PermissionError: this process is root's; that would be all processes there are.
    """
    if 0 in os.getresuid():
        raise PermissionError("root does not end all processes")
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def gain_no_privileges() -> None:
    """From now on, nothing that this process or a descendant starts has more rights than it, as `sudo` would."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def adopt_orphans() -> None:
    """From now on, descendants whose parent ends become children of this process instead of the system's first."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set the name of this process in `ps` and `top`; up to 15 characters."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def raise_oom_score() -> None:
    """Have the kernel end this process before others when the machine runs out of memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")


def bound_memory(byte_count: int) -> None:
    """From now on this process can take so much memory in addition to what it has; more is refused to it.

    It counts what is private and writable (`RLIMIT_DATA`), so a tensor that does not fit fails with PyTorch's own error
    and the session goes on. What a GPU's driver only reserves does not count.
    """
    held = 0
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmData:"):
            held = int(line.split()[1]) << 10
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = held + byte_count
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    # The hard limit, too: code of the client cannot raise it again.
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, wanted))


def private_bytes() -> int:
    """The memory that this process alone holds; 0 where the system does not tell."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith(("Private_Dirty:", "Private_Clean:", "Private_Hugetlb:")):
                total += int(line.split()[1]) << 10
    return total


def resident_bytes(pid: int) -> int:
    """The memory of a process that no file backs; 0 where it has ended. What it shares with others counts, too."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) << 10
    return total


def children_of_this_process() -> list[int]:
    """The processes whose parent is this one, ended ones that nobody waited for included."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError, ValueError):
            found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found
