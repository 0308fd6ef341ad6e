"""Control of this user's running programs by `skyproxy move`: a loopback port, and a file that only the user can read.

Nothing that a worker sends leads here, and what is asked names saved contexts of this machine: a program sends a token
to the address that its own user saved with it, and to no other.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from skyproxy.contexts import state_folder, write_private
from skyproxy.errors import SkyproxyError
from skyproxy.providers.processes import identity_of, is_alive

logger = logging.getLogger("skyproxy")

_MAX_BYTES = 4096
_REQUEST_SECONDS = 5.0
_ANSWER_SECONDS = 600.0

Move = Callable[[str, str], int]
"""Moves the sessions of this program from the worker of one context to that of another: `move(before, after)`."""


def programs_folder() -> Path:
    """The folder with a file for each program."""
    return state_folder() / "programs"


class ProgramControl:
    """The port of this program, once it is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = 0
        self._path: Path | None = None
        self._listening: socket.socket | None = None

    def start(self, move: Move) -> None:
        """Listen, unless that is done already. A program that cannot listen goes on without."""
        with self._lock:
            if self._process == os.getpid():
                return
            self._process = os.getpid()
            try:
                listening = socket.create_server(("127.0.0.1", 0))
                secret = secrets.token_urlsafe(32)
                path = programs_folder() / f"{os.getpid()}.json"
                row = {
                    "process_id": os.getpid(),
                    "identity": identity_of(os.getpid()),
                    "port": listening.getsockname()[1],
                    "secret": secret,
                }
                write_private(path, json.dumps(row) + "\n")
            except (OSError, SkyproxyError) as problem:
                logger.debug("skyproxy: skyproxy move will not find this program: %s", problem)
                return
            self._path, self._listening = path, listening
        atexit.register(self.stop)
        threading.Thread(
            target=self._run, args=(listening, secret, move), name="skyproxy-program-control", daemon=True
        ).start()

    def stop(self) -> None:
        """Listen no longer; idempotent. After a fork, the file and the port are the parent's."""
        with self._lock:
            if self._process != os.getpid():
                return
            path, listening, self._process = self._path, self._listening, 0
            self._path = self._listening = None
        if path is not None:
            path.unlink(missing_ok=True)
        if listening is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _run(self, listening: socket.socket, secret: str, move: Move) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                try:
                    self._answer(connection, secret, move)
                except Exception:  # every user of this machine can send anything here
                    logger.debug("skyproxy: a request to move was not answered", exc_info=True)

    def _answer(self, connection: socket.socket, secret: str, move: Move) -> None:
        request = json.loads(_read_line(connection, _REQUEST_SECONDS))
        if type(request) is not dict or not hmac.compare_digest(str(request.get("secret")).encode(), secret.encode()):
            return
        try:
            answer: dict[str, object] = {"moved": move(str(request.get("from")), str(request.get("to")))}
        except SkyproxyError as problem:
            answer = {"moved": 0, "problem": str(problem)}
        connection.settimeout(_REQUEST_SECONDS)
        connection.sendall(json.dumps(answer).encode() + b"\n")


PROGRAM_CONTROL = ProgramControl()


def ask_programs(before: str, after: str) -> list[dict[str, object]]:
    """Ask every running program of this user to move its sessions.

    Args:
        before, after: saved contexts.

    Returns:
        For each program that answered: "process_id", "moved", how many sessions, and "problem", why not all were.
    """
    answers = []
    for path in sorted(programs_folder().glob("*.json")):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            number, identity, port, secret = (row[key] for key in ("process_id", "identity", "port", "secret"))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not is_alive(int(number), str(identity)):
            path.unlink(missing_ok=True)
            continue
        try:
            with socket.create_connection(("127.0.0.1", int(port)), _REQUEST_SECONDS) as connection:
                request = {"secret": secret, "from": before, "to": after}
                connection.sendall(json.dumps(request).encode() + b"\n")
                answer = json.loads(_read_line(connection, _ANSWER_SECONDS, 1 << 20))
        except (OSError, ValueError) as problem:
            answer = {"moved": 0, "problem": f"it does not answer: {problem}"}
        answers.append({**answer, "process_id": number})
    return answers


def _read_line(connection: socket.socket, seconds: float, most: int = _MAX_BYTES) -> bytes:
    """Read a line.

    Raises:
        OSError: it did not come in time.
        ValueError: it is longer than it may be.
    """
    until = time.monotonic() + seconds
    read = b""
    while not read.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(_MAX_BYTES)
        read += part
        if not part or len(read) > most:
            raise ValueError("no line, or one that is too long")
    return read
