"""Child processes that end with their owner, whatever ends it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def bound(argv: Sequence[str], death_signal: str = "KILL") -> list[str]:
    """The same command, but the kernel ends it when the thread that starts it is gone."""
    return ["setpriv", "--pdeathsig", death_signal, "--", *argv]


class Process:
    """A component of the control plane, with a log of its own.

    Start it on the main thread: its life is bound to that of the thread.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        death_signal: str = "KILL",
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log = log
        self._again = functools.partial(Process, name, argv, log, env=env, death_signal=death_signal, pass_fds=pass_fds)
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                bound(argv, death_signal),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C is for pytest, which then ends us in order.
                pass_fds=pass_fds,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return self._popen.poll() is not None

    def again(self) -> Process:
        """Kills it, as a failure would, and gives another one of its kind."""
        self._popen.kill()
        self._popen.wait()
        return self._again()

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Ends it: SIGTERM, then SIGKILL after the grace. Idempotent."""
        if self.ended:
            return
        self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
