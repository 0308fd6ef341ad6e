"""Snapshots that a client has written to its worker's volume as it likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="deaths are told by Linux")
def test_a_few_hundred_changed_snapshots_end_no_worker_and_give_nothing_foreign() -> None:
    # In a process of its own: it forks, and its children may die.
    command = [sys.executable, "-m", "tests.security.snapshot_fuzzing", "--documents", "300", "--seed", "1000000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "'restored'" in done.stdout
    assert "'refused'" in done.stdout
