"""Tunnels over ssh to a port of a host, for as long as this process lives."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import subprocess
import threading
import time
from typing import IO

from skyproxy.errors import ConnectError, SkyproxyError
from skyproxy.providers.bounded_output import read_to_end
from skyproxy.providers.ssh_connection import ANSWER_SECONDS, CONNECT_SECONDS, SshTarget, failure

logger = logging.getLogger("skyproxy")

_MOST_TOLD_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16
_PIECE_BYTES = 1 << 16
_LARGEST_PIPE_BYTES = 1 << 20
_READY = b"skyproxy-tunnel-is-open\n"


class Tunnel:
    """A port of this machine that leads to one of a host, for as long as this process lives or until `close`.

    Where ssh ends, because the network or the host was away, it is started again and the port stays the same; so it is
    where it hangs, which `check` finds out.

    Attributes:
        port: on this machine.
    """

    _ATTEMPTS = 5
    _ECHO_SECONDS = 15.0
    _FIRST_PAUSE_SECONDS = 0.5
    _LONGEST_PAUSE_SECONDS = 15.0

    def __init__(self, target: SshTarget, remote_port: int) -> None:
        """Open the tunnel.

        Raises:
            ConnectError: the host cannot be reached.
        """
        from skyproxy.providers.local import free_port  # late: commands that open no tunnel do without

        self._target = target
        self._remote_port = remote_port
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._echoing = threading.Lock()
        self._problem = ""
        for attempt in range(self._ATTEMPTS):
            self.port = free_port()
            try:
                self._process = self._open()
                break
            except ConnectError as error:
                # Somebody else took the port in between.
                if "forward" not in str(error) or attempt == self._ATTEMPTS - 1:
                    raise
        self._keeper = threading.Thread(target=self._keep, name="skyproxy-ssh-tunnel", daemon=True)
        self._keeper.start()

    @property
    def url(self) -> str:
        """The address of a worker at its other end."""
        return f"ws://127.0.0.1:{self.port}"

    def _open(self) -> subprocess.Popen[bytes]:
        leads = f"127.0.0.1:{self.port}:127.0.0.1:{self._remote_port}"
        # Not ExitOnForwardFailure: forwards of the user's configuration that another login has already are no failure.
        options = ("-o", "ExitOnForwardFailure=no", "-L", leads)
        # `cat` ends with its input, which is ours: no tunnel outlives this process, however that ends. The first `echo`
        # ends the line of a greeting that has no end.
        command = [*self._target.command(*options, shared=False), f"echo; echo {_READY.decode().strip()}; exec cat"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is meant for the program
        )
        assert process.stdout is not None
        assert process.stderr is not None
        watchdog = threading.Timer(ANSWER_SECONDS, process.kill)
        watchdog.daemon = True
        watchdog.start()
        errors = _Errors(process.stderr, f"cannot listen to port: {self.port}".encode())
        try:
            if not _becomes_ready(process.stdout, errors):
                told = read_to_end(process.stderr, errors.kept, _MOST_TOLD_BYTES).decode(errors="replace")
            elif not errors.has_mark():
                return process
            else:
                process.kill()  # it says that somebody else has the port
                told = f"port {self.port} cannot be forwarded: it is taken"
        except BaseException:
            _end(process)
            raise
        finally:
            watchdog.cancel()
        _end(process)
        error = failure(self._target, "sh", process.returncode, told)
        raise error if isinstance(error, ConnectError) else ConnectError(str(error))

    def check(self) -> None:
        """Check that the tunnel is up: that the host sends back what it is sent. One that hangs is ended.

        Raises:
            ConnectError: ssh has ended and is not back yet, or did not answer in time; says why.
        """
        process = self._process
        if process.poll() is None and self._echoes(process):
            return
        if process.poll() is None:
            process.kill()  # also one that was stopped; its keeper sees the end
            raise ConnectError(
                f"the tunnel to {self._target.shown} did not answer for {self._ECHO_SECONDS:g} s and is opened again"
            )
        why = f": {self._problem}" if self._problem else ""
        raise ConnectError(f"the tunnel to {self._target.shown} has ended and is opened again{why}")

    def _echoes(self, process: subprocess.Popen[bytes]) -> bool:
        """Return whether `cat` on the host sends back a line in time; True where that cannot be found out."""
        if not hasattr(select, "poll"):  # Windows, whose pipes cannot be waited for
            return True
        deadline = time.monotonic() + self._ECHO_SECONDS
        if not self._echoing.acquire(timeout=self._ECHO_SECONDS):
            return process is not self._process  # another thread finds the same out
        try:
            if process is not self._process:
                return True
            assert process.stdin is not None
            assert process.stdout is not None
            line, came = b"%s\n" % secrets.token_hex(8).encode(), b""
            os.write(process.stdin.fileno(), line)
            waiting = select.poll()
            waiting.register(process.stdout, select.POLLIN)
            while line not in came:
                if not waiting.poll(max(deadline - time.monotonic(), 0.0) * 1e3):
                    return False
                part = os.read(process.stdout.fileno(), 4096)
                if not part:
                    return False
                came = came[-len(line) :] + part
            return True
        except (OSError, ValueError):  # it has ended meanwhile, and its pipes are closed
            return False
        finally:
            self._echoing.release()

    def _keep(self) -> None:
        """Start ssh again whenever it ends."""
        pause = self._FIRST_PAUSE_SECONDS
        while True:
            assert self._process.stderr is not None
            read_to_end(self._process.stderr, bytearray(), _MOST_TOLD_BYTES)
            with self._echoing:  # whose descriptors are not taken away from it
                _end(self._process)
            if self._closed.is_set():
                return
            logger.warning("skyproxy: the tunnel to %s has ended and is opened again", self._target.shown)
            while not self._closed.wait(pause):
                try:
                    process = self._open()
                except SkyproxyError as error:
                    pause = min(pause * 2, self._LONGEST_PAUSE_SECONDS)
                    if str(error) != self._problem:  # once for each reason: a host can be away for hours
                        logger.warning("skyproxy: %s", error)
                    self._problem = str(error)
                    continue
                pause = self._FIRST_PAUSE_SECONDS
                with self._lock:
                    self._process, self._problem = process, ""
                    if not self._closed.is_set():
                        break
                _end(process)
            if self._closed.is_set():
                return

    def close(self) -> None:
        """End the tunnel; idempotent."""
        with self._lock:
            self._closed.set()
            process = self._process
        with contextlib.suppress(OSError):
            process.terminate()
        if threading.current_thread() is not self._keeper:
            self._keeper.join(CONNECT_SECONDS * 2)


class _Errors:
    """The messages of an ssh that is starting, which waits when nobody reads them; the host may write any amount there.

    Attributes:
        kept: the end of them.
    """

    def __init__(self, stream: IO[bytes], mark: bytes) -> None:
        self.kept = bytearray()
        self.descriptor = stream.fileno()
        self._mark = mark
        self._found = False

    def take(self) -> bool:
        """Read a piece, which must be there; False at the end."""
        piece = os.read(self.descriptor, _PIECE_BYTES)
        self._found = self._found or self._mark in self.kept[-len(self._mark) :] + piece
        self.kept += piece
        del self.kept[:-_MOST_TOLD_BYTES]
        return bool(piece)

    def has_mark(self) -> bool:
        """Return whether ssh has said so: it does before anything runs on the host, so what is there now tells it."""
        os.set_blocking(self.descriptor, False)
        try:
            # More than a pipe holds: what the host goes on to write is not waited for.
            for _ in range(_LARGEST_PIPE_BYTES // _PIECE_BYTES):
                if not self.take():
                    break
        except BlockingIOError:
            pass
        finally:
            os.set_blocking(self.descriptor, True)
        return self._found


def _becomes_ready(output: IO[bytes], errors: _Errors) -> bool:
    """Wait until the host says that a tunnel is open; False where ssh ends before."""
    if not hasattr(select, "poll"):  # Windows, whose pipes cannot be waited for
        return any(line == _READY for line in iter(lambda: output.readline(_LONGEST_LINE), b""))
    waiting = select.poll()
    waiting.register(output, select.POLLIN)
    waiting.register(errors.descriptor, select.POLLIN)
    came = b""
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor == errors.descriptor:
                if not errors.take():
                    waiting.unregister(descriptor)
                continue
            part = os.read(descriptor, _PIECE_BYTES)
            if not part:
                return False
            came = came[-len(_READY) :] + part
            if b"\n" + _READY in came:
                return True


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
