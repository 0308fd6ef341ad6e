"""How a session's process ended, as the kernel reports it and as its client reads it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from skyproxy_server.endings import LOST_STATUS, ProcessEnding
from skyproxy_server.limits import are_sessions_separable

if not are_sessions_separable():
    pytest.skip("session processes need Linux", allow_module_level=True)

UNKNOWN_SIGNAL = 63

CASES = [
    (ProcessEnding(), "exited with status 0", "A function may have ended it."),
    (ProcessEnding(status=5), "exited with status 5", "A function may have ended it."),
    (ProcessEnding(status=LOST_STATUS), "exited with status 70", "SKYPROXY_LAUNCH_BLOCKING=1"),
    (ProcessEnding(signal_number=signal.SIGKILL), "killed by signal 9 (SIGKILL)", "memory ran out"),
    (ProcessEnding(signal_number=signal.SIGSEGV), "killed by signal 11 (SIGSEGV)", "SKYPROXY_LAUNCH_BLOCKING=1"),
    (ProcessEnding(signal_number=signal.SIGABRT), "killed by signal 6 (SIGABRT)", "SKYPROXY_LAUNCH_BLOCKING=1"),
    (ProcessEnding(signal_number=signal.SIGTERM), "killed by signal 15 (SIGTERM)", "A function may have ended it."),
    (ProcessEnding(signal_number=UNKNOWN_SIGNAL), "killed by signal 63 (unknown)", "A function may have ended it."),
]


@pytest.mark.parametrize(("ending", "how", "advice"), CASES)
def test_a_client_is_told_what_happened_and_what_to_do(ending: ProcessEnding, how: str, advice: str) -> None:
    words = ending.for_client()
    assert how in words
    assert advice in words
    assert words.startswith("its process on the worker ")
    assert words.endswith("Other sessions of the worker go on.")


def test_what_the_worker_ended_itself_needs_no_advice() -> None:
    ending = ProcessEnding(signal.SIGKILL, 0, "its client is gone, and it hangs")
    assert ending.description == "was ended by the worker: its client is gone, and it hangs"
    assert "memory" not in ending.for_client()
    assert "SIGKILL" not in ending.for_client()


@pytest.mark.parametrize(
    ("ending", "fails"),
    [
        (ProcessEnding(), False),
        (ProcessEnding(status=1), True),
        (ProcessEnding(9), True),
        (ProcessEnding(reason="revoked"), True),
    ],
)
def test_only_an_end_in_order_is_no_failure(ending: ProcessEnding, fails: bool) -> None:
    assert ending.is_failure is fails


@pytest.mark.parametrize(
    ("program", "ending"),
    [
        ("pass", ProcessEnding()),
        ("import os; os._exit(7)", ProcessEnding(status=7)),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ProcessEnding(signal_number=signal.SIGKILL)),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", ProcessEnding(signal_number=signal.SIGTERM)),
    ],
)
def test_the_kernel_tells_how_a_process_ended(program: str, ending: ProcessEnding) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", program])
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    process.wait()
    assert result is not None
    assert ProcessEnding.of(result) == ending
    assert ProcessEnding.of(result, "why").reason == "why"
