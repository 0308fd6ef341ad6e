"""The processes of isolated functions, seen from the worker: one is kept ready, and each serves one call."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import struct
import subprocess
import sys
import threading

from skyproxy.errors import LimitExceededError, RemoteFunctionError
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.endings import ProcessEnding
from skyproxy_server.limits import are_sessions_separable

ENDING = struct.Struct("!ii")
"""The signal that killed a process, else 0; and what it exited with."""
_END_SECONDS = 5.0
_LOAD_SECONDS = 60.0
"""The time that its process may take to load what functions need; it looks up only then."""
_SEND_SECONDS = 30
"""The time for which a process may not read what it is sent before it counts as gone."""


class Fledgling:
    """The process of one call.

    Attributes:
        channel: to it.
        out, err: what it writes to its standard output and error, as files that do not block.
    """

    def __init__(self, number: int, nursery: ControlChannel) -> None:
        self._number = number
        self._nursery = nursery
        self.channel, theirs = ControlChannel.pair(send_seconds=_SEND_SECONDS)
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        self._report, report = os.pipe()
        for descriptor in (self.out, self.err):
            os.set_blocking(descriptor, False)
        try:
            nursery.send({"order": "fork", "number": number}, [theirs.fileno(), out, err, report])
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            for descriptor in (out, err, report):
                os.close(descriptor)

    def is_ready(self) -> bool:
        """Return whether it has not ended, as far as is known."""
        return not self._has_reported(0)

    def _has_reported(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def kill(self) -> None:
        """End it. From any thread."""
        with contextlib.suppress(ChannelClosedError):
            self._nursery.send({"order": "kill", "number": self._number})

    def ending(self) -> ProcessEnding:
        """Wait until it has ended, but not for long; it is killed then."""
        for _ in range(2):
            if self._has_reported(_END_SECONDS):
                break
            self.kill()
        else:
            return ProcessEnding(reason="it did not end")
        data = os.read(self._report, ENDING.size)
        if len(data) < ENDING.size:
            return ProcessEnding(reason="the process that it was forked from has ended")
        number, status = ENDING.unpack(data)
        return ProcessEnding(number, status)

    def close(self) -> None:
        """Let go of it; it ends where it has not."""
        self.channel.close()
        for descriptor in (self.out, self.err, self._report):
            os.close(descriptor)


class Nursery:
    """Makes processes for functions.

    Its own process starts with the first, and ends with the last session that wanted one, or with this process. One
    process is always ready for the next call.

    Args:
        max_processes: how many may serve calls at a time.
    """

    def __init__(self, max_processes: int) -> None:
        self._max_processes = max_processes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: ControlChannel | None = None
        self._spare: Fledgling | None = None
        self._numbers = itertools.count(1)
        self._busy = 0
        self._sessions: set[str] = set()

    @staticmethod
    def is_possible() -> bool:
        """Return whether this system has what it needs: Linux, and more of it than some sandboxes have."""
        return are_sessions_separable()

    def take(self, session: str) -> Fledgling:
        """Return a process for one call of a session; to be given back.

        Raises:
            LimitExceededError: as many as may run do.
            RemoteFunctionError: none can be made.
        """
        with self._lock:
            if self._busy >= self._max_processes:
                raise LimitExceededError(
                    f"this worker already runs {self._busy} functions in processes of their own, its limit; "
                    "SKYPROXY_MAX_ISOLATED_CALLS raises it"
                )
            self._sessions.add(session)
            spare, self._spare = self._spare, None
            if spare is not None and not spare.is_ready():
                spare.close()  # it has ended meanwhile, perhaps with its nursery
                spare = None
            try:
                taken = spare or self._fork()
            except (OSError, ChannelClosedError) as error:
                self._end()
                raise RemoteFunctionError(f"a process for the function cannot be made: {error}") from error
            self._busy += 1
            with contextlib.suppress(OSError, ChannelClosedError):
                self._spare = self._fork()
            return taken

    def _fork(self) -> Fledgling:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._start()
        assert self._channel is not None
        return Fledgling(next(self._numbers), self._channel)

    def _start(self) -> None:
        _allow_many_files()
        channel, theirs = ControlChannel.pair()
        with theirs:
            command = [sys.executable, "-P", "-m", "skyproxy_server.functions.nursery_process"]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={name: value for name, value in os.environ.items() if name != "SKYPROXY_TOKEN"},
            )
        self._channel = channel

    def give_back(self, taken: Fledgling) -> None:
        """The call is over."""
        taken.kill()
        taken.close()
        with self._lock:
            self._busy -= 1
            self._end_if_unused()

    def session_ended(self, session: str) -> None:
        """A session wants no more processes; those of its calls go on."""
        with self._lock:
            self._sessions.discard(session)
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if not self._sessions and not self._busy:
            self._end()

    def _end(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        process, self._process = self._process, None
        if process is not None:
            # It ends by itself, with all that functions have left behind; nobody waits for that.
            threading.Thread(target=_see_end, args=(process,), name="skyproxy-nursery", daemon=True).start()


def _see_end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_LOAD_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _allow_many_files() -> None:
    """Each storage that is lent is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
