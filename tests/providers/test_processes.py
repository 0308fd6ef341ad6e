"""Telling processes apart, and ending those that are meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from skyproxy.providers import processes
from skyproxy.providers.processes import end, identity_of, is_alive

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals and groups")


def start(program: str) -> subprocess.Popen[str]:
    """A program in a group of its own that has said that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[str]]:
    process = start("import signal; print('ready', flush=True); signal.pause()")
    yield process
    process.kill()
    process.communicate()


def test_an_identity_stays_and_ends_with_its_process(waiting: subprocess.Popen[str]) -> None:
    identity = identity_of(waiting.pid)
    assert identity is not None
    assert identity_of(waiting.pid) == identity
    assert identity != identity_of(os.getpid())
    waiting.kill()
    waiting.wait()
    assert identity_of(waiting.pid) is None


def test_a_zombie_is_not_alive(waiting: subprocess.Popen[str]) -> None:
    identity = str(identity_of(waiting.pid))
    waiting.kill()
    os.waitid(os.P_PID, waiting.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(waiting.pid, identity)


def test_end_asks_first(waiting: subprocess.Popen[str]) -> None:
    assert end(waiting.pid, str(identity_of(waiting.pid)), 30)
    assert waiting.wait() == -signal.SIGTERM


def test_end_insists_with_who_does_not_listen_and_with_its_children() -> None:
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    stubborn = start(
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print('ready', flush=True)\nsignal.pause()"
    )
    assert end(stubborn.pid, str(identity_of(stubborn.pid)), 0.1)
    # The child held the pipe; it ends only when both are gone.
    stubborn.communicate(timeout=30)
    assert stubborn.returncode == -signal.SIGKILL


def test_another_process_with_the_same_number_is_left_alone(waiting: subprocess.Popen[str]) -> None:
    assert end(waiting.pid, "the identity of an earlier one", 1)
    assert waiting.poll() is None


def test_without_proc_psutil_tells_the_same(waiting: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "Path", lambda _path: _Absent())
    identity = identity_of(waiting.pid)
    assert identity is not None
    assert identity == identity_of(waiting.pid)
    waiting.kill()
    os.waitid(os.P_PID, waiting.pid, os.WEXITED | os.WNOWAIT)
    assert identity_of(waiting.pid) is None


class _Absent:
    def exists(self) -> bool:
        return False
