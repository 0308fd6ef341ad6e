"""The sockets by which `skyproxy debug` finds the programs whose functions wait: a folder, and lines of JSON.

They are files that only their user can open; nothing of it is reached from another machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyproxy.errors import ConfigurationError

MAX_LINE_BYTES = 1 << 20
_ANSWER_SECONDS = 10.0


def folder() -> Path:
    """The folder of the sockets, made where there is none.

    Raises:
        ConfigurationError: this system has no such sockets, or somebody else can get at the folder.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigurationError("skyproxy debug needs sockets that are files, which this system does not have.")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    name = "skyproxy-debug" if runtime else f"skyproxy-debug-{os.getuid()}"
    place = Path(runtime or tempfile.gettempdir()) / name
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigurationError(f"{place} is not a folder of this user alone; remove it, and debug again.")
    return place


class Line:
    """A connection on which each message is one line."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._file = sock.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the other end, from any thread.

        Raises:
            OSError: the other end is gone.
        """
        with self._sending:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Receive the next message.

        Raises:
            OSError: the other end is gone, or sends what is not a message.
        """
        data = self._file.readline(MAX_LINE_BYTES)
        if not data.endswith(b"\n"):
            raise ConnectionError("the other end has left")
        try:
            message = json.loads(data)
        except ValueError as error:
            raise ConnectionError("no message") from error
        if not isinstance(message, dict):
            raise ConnectionError("no message")
        return message

    def wait_for_ever(self) -> None:
        """Wait for what comes next as long as it takes: a person thinks at the other end."""
        self._socket.settimeout(None)

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._socket.close()


def listen() -> tuple[socket.socket, Path]:
    """Open this process's socket.

    Raises:
        ConfigurationError: see `folder`.
        OSError: it cannot be made.
    """
    path = folder() / f"{os.getpid()}.sock"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener, path


def programs() -> Iterator[Line]:
    """Connect to each program that waits; to be closed. Sockets of programs that have ended are removed."""
    for path in sorted(folder().glob("*.sock")):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(_ANSWER_SECONDS)
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            sock.close()
            path.unlink(missing_ok=True)
        except OSError:
            sock.close()
        else:
            yield Line(sock)


def waiting(line: Line) -> list[dict[str, Any]]:
    """Ask a program what waits there; nothing where it does not answer."""
    try:
        line.send({"list": True})
        rows = line.receive().get("waiting", [])
    except OSError:
        return []
    return [row for row in rows if isinstance(row, dict)]
