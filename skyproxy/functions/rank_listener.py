"""The worker's end for breakpoints in the processes of a script: a socket in a folder of its own user's.

What the processes say is believed as little as what a function says: they belong to it. Whoever attaches does it by a
function in the session that runs the script, so nobody gets at them who could not run code there anyway.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from skyproxy.runtime import rank_start
from skyproxy.runtime.breakpoints import DEBUGGERS, Place, known_place
from skyproxy.runtime.debug_rooms import Line
from skyproxy.runtime.distant_debugger import DistantDebugger
from skyproxy.runtime.rank_debugger import SOCKET_VARIABLE, stop

_MAX_PROCESSES = 256
"""Of a node that may wait at once: its ranks, and what they have started."""
_ENDING_SECONDS = 5.0


class RankListener:
    """Takes the words of processes that wait, and gives them those of whoever looks."""

    def __init__(self, folder: Path, seconds: float, announce: Callable[[Place], object], pool: str) -> None:
        """Open the socket.

        Args:
            folder: which only this user can open.
            seconds: for which a process waits for somebody.
            announce: tells the script's caller where a process waits.
            pool: names the pool that the script runs on.

        Raises:
            OSError: it cannot be opened.
        """
        self._path = folder / "debug"
        self._seconds = seconds
        self._announce = announce
        self._pool = pool
        self._lines: set[Line] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(self._path))
            self._path.chmod(0o600)
            self._listener.listen()
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="skyproxy-debug", daemon=True)
        self._thread.start()

    def variables(self, python_path: str) -> dict[str, str]:
        """Return the environment variables by which the processes find the way here.

        Args:
            python_path: their `PYTHONPATH` without it.
        """
        start = os.path.dirname(os.path.abspath(rank_start.__file__))
        return {
            "PYTHONBREAKPOINT": f"{stop.__module__}.{stop.__name__}",
            "PYTHONPATH": os.pathsep.join(part for part in (start, python_path) if part),
            "SKYPROXY_BREAKPOINT_SECONDS": str(self._seconds),
            SOCKET_VARIABLE: str(self._path),
        }

    def close(self) -> None:
        """Let go of all processes: those that wait go on to their end."""
        with self._lock:
            self._closed = True
            lines = list(self._lines)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in lines:
            line.close()
        self._thread.join(_ENDING_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            line = Line(sock)
            with self._lock:
                is_taken = not self._closed and len(self._lines) < _MAX_PROCESSES
                if is_taken:
                    self._lines.add(line)
            if is_taken:
                threading.Thread(target=self._serve, args=(line,), name="skyproxy-debug-one", daemon=True).start()
            else:
                line.close()

    def _serve(self, line: Line) -> None:
        debugger = DistantDebugger(secrets.token_hex(16), line.send)
        DEBUGGERS.add(debugger)
        place: Place = {}
        try:
            while True:
                message = line.receive()
                if "waits" in message:
                    place = {**known_place(message["waits"]), "pool": self._pool, "debugger": debugger.identity}
                    self._announce(place)
                else:
                    debugger.hear(message.get("said"))
        except (OSError, ValueError):
            pass  # it has ended, or does not say what a process of ours says
        finally:
            DEBUGGERS.end(debugger)
            with self._lock:
                self._lines.discard(line)
            line.close()
            if place:
                self._announce({**place, "kind": "gone"})


@contextlib.contextmanager
def listening(
    folder: Path, seconds: float | None, announce: Callable[[Place], object] | None, pool: str
) -> Iterator[RankListener | None]:
    """Listen while a script runs; give None where nobody wants to debug it."""
    if seconds is None or announce is None or not hasattr(socket, "AF_UNIX"):
        yield None
        return
    try:
        listener = RankListener(folder, seconds, announce, pool)
    except OSError as error:
        print(f"skyproxy: breakpoints of this script cannot wait for a debugger: {error}", file=sys.stderr)
        yield None
        return
    try:
        yield listener
    finally:
        listener.close()
