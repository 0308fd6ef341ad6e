"""Commands that end within a limit, with every process that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


def run_limited(
    command: Sequence[str],
    variables: Mapping[str, str],
    limit_seconds: float,
    folder: Path,
    output: IO[str] | None = None,
) -> int | None:
    """Run a command in a process group of its own, which ends with it.

    Args:
        variables: its whole environment.
        folder: where it runs.
        output: where what it prints goes; by default where this process prints.

    Returns:
        Its exit status; None where the limit ended it.
    """
    errors = None if output is None else subprocess.STDOUT
    process = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=errors, start_new_session=True)
    try:
        return process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Pytest's processes and workers go, too; an interrupt does not reach them by itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_with_processes() -> None:
    """Let SIGTERM end this process as an interrupt does, so that what `run_limited` started ends with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def session_timeout(limit_seconds: float) -> str:
    """Return the option by which pytest notices the time itself, and still writes its report of what ran.

    Tests that have begun go on to their ends first: on a machine with a GPU, 10 of 200 s were too few for that.
    """
    return f"--session-timeout={limit_seconds * 0.85:.0f}"
