"""Helper processes of the benchmarks: each announces itself in one line of JSON, and ends when its parent does."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


def announce(**values: Any) -> None:
    """In the helper: tells the parent, in one line."""
    print(json.dumps(values), flush=True)


def end_with_parent() -> None:
    """In the helper: ends this process when standard input ends, whatever its threads do."""
    threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.buffer.readline(4096):
            pass
    os._exit(0)


class HelperProcess:
    """A child process that was started from a script beside this file, or from any Python command line.

    Attributes:
        announced: what it said in its first line.
    """

    def __init__(self, *command: str, first_line: str = "", timeout_seconds: float = 60.0) -> None:
        """Starts it and waits for its first line.

        Args:
            command: arguments for Python; a name ending in ".py" is a script beside this file.
            first_line: sent to its standard input at once; for secrets, which no argument may hold.
            timeout_seconds: how long its first line may take.

        Raises:
            RuntimeError: it said nothing in time.
        """
        arguments = [str(FOLDER / command[0]) if command[0].endswith(".py") else command[0], *command[1:]]
        self._process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            if first_line:
                self._say(first_line)
            self.announced = self._hear(timeout_seconds)
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        """The child's process id."""
        return self._process.pid

    def ask(self, question: str, timeout_seconds: float = 60.0) -> dict[str, Any]:
        """Sends one line and gives the line that comes back."""
        self._say(question)
        return self._hear(timeout_seconds)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self, timeout_seconds: float) -> dict[str, Any]:
        lines: list[str] = []
        stdout = self._process.stdout
        assert stdout is not None
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()
        reader.join(timeout_seconds)
        if not lines or not lines[0].strip():
            raise RuntimeError(
                f"a helper process ended or said nothing in {timeout_seconds:.0f} s: {self._process.args}"
            )
        answer: dict[str, Any] = json.loads(lines[0])
        return answer

    def close(self) -> None:
        """Ends the process; idempotent."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> HelperProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


__all__ = ["FOLDER", "HelperProcess", "announce", "end_with_parent"]
