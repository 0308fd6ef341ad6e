"""Workers as copies of a process that has imported PyTorch once: started in a fraction of the time.

On Linux only, and only for workers that compute on the CPU: whoever has touched a GPU cannot be copied. Where the
server cannot be had, whoever wants a process starts it in the ordinary way.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from skyproxy.runtime.descendants import MARK_VARIABLE, end_marked

logger = logging.getLogger("skyproxy.session")

_MAX_MESSAGE_BYTES = 4096
_START_SECONDS = 120.0
_ANSWER_SECONDS = 30.0
_STOP_SECONDS = 5.0
_UNKNOWN_STATUS = 255
"""The exit status of a worker whose server has ended before it."""


_servers: weakref.WeakSet[ForkServer] = weakref.WeakSet()


class WorkerProcess(Protocol):
    """The process of a worker, as `subprocess.Popen` has it."""

    pid: int
    returncode: Any
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class ForkedProcess:
    """A process that the server forked; in what is used of it, a `subprocess.Popen`."""

    def __init__(self, process_id: int, stdin: IO[bytes], stdout: IO[bytes], has_ended: threading.Event) -> None:
        self.pid = process_id
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = stdin
        self.stdout: IO[bytes] | None = stdout
        self._has_ended = has_ended
        self._handle = os.pidfd_open(process_id)

    def poll(self) -> int | None:
        """The exit status, a signal's number below zero; None while it runs."""
        return self.returncode

    def ended(self, status: int) -> None:
        """It has ended, and was reaped."""
        if self.returncode is None:
            self.returncode = status
        self._has_ended.set()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End it, whatever it does; never another process that has its number by now."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Return whether it has ended, whoever knows its status."""
        poller = select.poll()
        poller.register(self._handle, select.POLLIN)
        return bool(poller.poll(0))

    def __del__(self) -> None:
        try:
            os.close(self._handle)
        except (AttributeError, OSError):  # not `suppress`: at the end of a program this module's names are gone
            pass


class ForkServer:
    """A process that forks workers.

    Args:
        python: the interpreter of the workers.
        variables: their environment; what differs from one to the next comes with each.

    Raises:
        OSError: it does not start, or may not fork.
    """

    def __init__(self, python: str, variables: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        self._owner = os.getpid()
        self._mark = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[int, int] = {}
        self._running: dict[int, ForkedProcess] = {}
        self._ends: dict[int, int] = {}
        self._is_over = False
        self._number = 0
        with theirs:
            self._process = subprocess.Popen(
                [python, "-P", "-m", "skyproxy_server.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(variables) | {MARK_VARIABLE: self._mark},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            ours.settimeout(_START_SECONDS)
            hello = json.loads(ours.recv(_MAX_MESSAGE_BYTES) or b"{}")
            if hello.get("threads") != 1:
                raise OSError(f"the server that forks workers has {hello.get('threads', 'no')} threads")
            ours.settimeout(None)
        except (OSError, ValueError) as error:
            self.stop()
            raise OSError(str(error)) from error
        _servers.add(self)
        self._reader = threading.Thread(target=self._read, name="skyproxy-forks", daemon=True)
        self._reader.start()

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], errors: IO[bytes]) -> ForkedProcess:
        """Fork a worker.

        Args:
            arguments: of `skyproxy_server`.
            variables: its environment.
            errors: takes its standard error.

        Raises:
            OSError: the server has ended, or does not answer.
        """
        their_input, our_end = os.pipe()
        our_output, their_output = os.pipe()
        stdin, stdout = os.fdopen(our_end, "wb"), os.fdopen(our_output, "rb")
        try:
            with self._lock:
                self._number += 1
                number = self._number
                order = {"number": number, "arguments": list(arguments), "variables": dict(variables)}
                socket.send_fds(
                    self._control, [json.dumps(order).encode()], [their_input, their_output, errors.fileno()]
                )
            return self._process_of(number, stdin, stdout)
        except BaseException:
            stdin.close()  # which ends it, wherever it is
            stdout.close()
            raise
        finally:
            os.close(their_input)
            os.close(their_output)

    def try_to_start(
        self, arguments: Sequence[str], variables: Mapping[str, str], errors: IO[bytes]
    ) -> ForkedProcess | None:
        """The same; None where it cannot be."""
        try:
            return self.start(arguments, variables, errors)
        except OSError as error:
            logger.debug("skyproxy: a worker is started in the ordinary way: %s", error)
            return None

    def _process_of(self, number: int, stdin: IO[bytes], stdout: IO[bytes]) -> ForkedProcess:
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._answers or self._is_over, _ANSWER_SECONDS):
                raise OSError("the server that forks workers does not answer")
            # Also where it has answered: nobody would tell of this one's end. Its input is closed, which ends it.
            if self._is_over:
                raise OSError("the server that forks workers has ended")
            process_id = self._answers.pop(number)
            try:
                has_ended = threading.Event()
                process = ForkedProcess(process_id, stdin, stdout, has_ended)
            except ProcessLookupError:
                raise OSError(f"the worker ended at once, with status {self._ends.pop(process_id, '?')}") from None
            if process_id in self._ends:
                process.ended(self._ends.pop(process_id))
            else:
                self._running[process_id] = process
            return process

    def _read(self) -> None:
        try:
            while data := self._control.recv(_MAX_MESSAGE_BYTES):
                self._take(json.loads(data))
        except (OSError, ValueError, KeyError):
            logger.debug("skyproxy: the server that forks workers is gone", exc_info=True)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            left = list(self._running.values())
        while left:  # nobody can tell their status any more
            for process in [process for process in left if process.is_gone()]:
                process.ended(_UNKNOWN_STATUS)
                left.remove(process)
            time.sleep(0.05)

    def _take(self, message: dict[str, int]) -> None:
        with self._changed:
            if "order" in message:
                self._answers[message["order"]] = message["process"]
                self._changed.notify_all()
                return
            process = self._running.pop(message["ended"], None)
            if process is None:
                self._ends[message["ended"]] = message["status"]
            else:
                process.ended(message["status"])

    def stop(self) -> None:
        """End the server, not its workers; idempotent, bounded in time."""
        if self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_marked(self._mark)
        self._control.close()

    def abandon_in_child(self) -> None:
        """After a fork, in the child: the server is the parent's."""
        self._control.close()
        self._process.returncode = 0


def can_fork(device: str) -> bool:
    """Return whether workers of this device may be forked here."""
    return (
        device == "cpu" and sys.platform == "linux" and hasattr(os, "pidfd_open") and os.path.exists("/proc/self/mem")
    )


def _after_fork_in_child() -> None:
    for server in list(_servers):
        server.abandon_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
