"""Processes that we did not start in this process: who they are, whether they live, and how they end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_POLL_SECONDS = 0.05


def identity_of(process_id: int) -> str | None:
    """Return what tells a living process from a later one with the same number; None where none lives."""
    if Path("/proc/self/stat").exists():
        return _identity_on_linux(process_id)
    import psutil  # where there is no /proc; the worker itself needs it too

    try:
        process = psutil.Process(process_id)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.Error:
        return None


def _identity_on_linux(process_id: int) -> str | None:
    try:
        # After the name, which stands in parentheses and may hold anything: the state, and 19 fields on the start time.
        fields = (
            Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def is_alive(process_id: int, identity: str) -> bool:
    """Return whether that very process still lives."""
    return identity_of(process_id) == identity


def end(process_id: int, identity: str, grace_seconds: float, first: signal.Signals = signal.SIGTERM) -> bool:
    """Ends a process and its group: asks first, then insists.

    Args:
        process_id: the leader of a group of its own.
        identity: what `identity_of` said when it was started; any other process is left alone.
        grace_seconds: how long it may take to end in order.
        first: what asks it to.

    Returns:
        Whether it is gone.
    """
    if not is_alive(process_id, identity):
        return True
    for number, seconds in ((first, grace_seconds), (getattr(signal, "SIGKILL", signal.SIGTERM), 5.0)):
        try:
            if hasattr(os, "killpg") and os.getpgid(process_id) == process_id:
                os.killpg(process_id, number)
            else:
                os.kill(process_id, number)
        except ProcessLookupError:
            return True
        deadline = time.monotonic() + seconds
        while is_alive(process_id, identity):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        else:
            return True
    return False


def wait_for_end(process_id: int, identity: str, timeout_seconds: float) -> bool:
    """Wait until a process has ended by itself; return whether it has."""
    deadline = time.monotonic() + timeout_seconds
    while is_alive(process_id, identity):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
