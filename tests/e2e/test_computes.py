"""What the end-to-end tests do to workers does what it says, on the kernel's own namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.computes import KILL_FIRST

_SAYS_SO = ["sh", "-c", "echo runs; exec sleep 1000"]


def started(*command: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([*command, *_SAYS_SO], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    return process


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="namespaces need root")
def test_a_worker_dies_by_the_script_and_not_by_a_signal_to_process_1() -> None:
    # As a container's runtime does it: process 1 is the Pod's pause, everything else is started from outside.
    pause = started("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    try:
        (first,) = Path(f"/proc/{pause.pid}/task/{pause.pid}/children").read_text().split()
        inside = ["nsenter", "--target", first, "--pid", "--mount"]
        with started(*inside) as worker:
            subprocess.run([*inside, "sh", "-c", "kill -9 1"], check=True, timeout=60)
            assert worker.poll() is None
            subprocess.run([*inside, "sh", "-c", KILL_FIRST], check=True, timeout=60)
            assert worker.wait(60) == -signal.SIGKILL
        assert pause.poll() is None
    finally:
        pause.kill()
        pause.communicate()
