"""The end of a session's process, in words for its client and for the log."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

LOST_STATUS = 70
"""The exit status of a process that has lost its CUDA context, see `lost_context`; EX_SOFTWARE of <sysexits.h>."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True, slots=True)
class ProcessEnding:
    """The end of a process.

    Attributes:
        signal_number: what killed it, else 0.
        status: what it exited with, else 0.
        reason: why the supervisor ended it, else empty.
    """

    signal_number: int = 0
    status: int = 0
    reason: str = ""

    @classmethod
    def of(cls, result: os.waitid_result, reason: str = "") -> ProcessEnding:
        """The end that the kernel reports."""
        if result.si_code == os.CLD_EXITED:
            return cls(0, result.si_status, reason)
        return cls(result.si_status, 0, reason)

    @property
    def is_failure(self) -> bool:
        """True if the process did not end by itself and in order."""
        return bool(self.signal_number or self.status or self.reason)

    @property
    def description(self) -> str:
        """The event in words: "was killed by signal 11 (SIGSEGV)", say."""
        if self.reason:
            return f"was ended by the worker: {self.reason}"
        if self.signal_number:
            return f"was killed by signal {self.signal_number} ({_signal_name(self.signal_number)})"
        return f"exited with status {self.status}"

    def for_client(self) -> str:
        """Return what the client is told: what happened, and what to do. That its tensors are gone, it says itself."""
        return f"its process on the worker {self.description}. {self._advice}Other sessions of the worker go on."

    @property
    def _advice(self) -> str:
        if self.reason:
            return ""
        if self.signal_number == signal.SIGKILL:
            return "Most often, memory ran out: use smaller batches, or a worker with more memory. "
        if self.status == LOST_STATUS:
            return "A kernel broke its CUDA context; SKYPROXY_LAUNCH_BLOCKING=1 finds the statement. "
        if self.signal_number in _CRASHES:
            return "An operation or a function crashed it; SKYPROXY_LAUNCH_BLOCKING=1 finds the statement. "
        return "A function may have ended it. "


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
