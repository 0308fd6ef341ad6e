"""Reports of a worker's session to its client: answers, and, unasked, failures and warnings of kernels."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from skyproxy.protocol.messages import Buffer, Failure, Message, Reply, RequestId, Warned
from skyproxy_server.failures import Failed
from skyproxy_server.kernel_warnings import KernelWarning
from skyproxy_server.lost_context import raise_if_lost

_REMEMBERED_FAILURES = 100
_RECENT_FAILURES = 10
_REPORTED_WARNINGS = 64
"""The number of times that a session is told of one warning of an operation; each has the line that recorded it."""
_DIFFERENT_WARNINGS = 1000
_MAX_WARNING_CHARACTERS = 2000


class Deferred:
    """An answer that is given later, by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome: tuple[object, Exception | None] | None = None
        self._reply: Callable[[object], None] | None = None
        self._refuse: Callable[[Exception], None] | None = None

    def tell(self, reply: Callable[[object], None], refuse: Callable[[Exception], None]) -> None:
        """Say who is told of it, at once where it is there already."""
        with self._lock:
            self._reply, self._refuse = reply, refuse
            outcome = self._outcome
        if outcome is not None:
            self._deliver(*outcome)

    def give(self, value: object) -> None:
        """Give the answer."""
        self._settle(value, None)

    def fail(self, error: Exception) -> None:
        """Give an error as the answer."""
        self._settle(None, error)

    def _settle(self, value: object, error: Exception | None) -> None:
        with self._lock:
            self._outcome = value, error
            is_awaited = self._reply is not None
        if is_awaited:
            self._deliver(value, error)

    def _deliver(self, value: object, error: Exception | None) -> None:
        assert self._reply is not None
        assert self._refuse is not None
        if error is None:
            self._reply(value)
        else:
            self._refuse(error)


class Reports:
    """The messages of one session to its client, each with the place of the command that it speaks of.

    Attributes:
        sequence: the batch that is being executed.
        graph: the number of the graph that is being replayed, else None; positions are in its own stream then.
        unreported: failures that the client was not given as an answer yet.
        recent: the latest failures and when they happened, in seconds since 1970; for the web view.
        watch: called with each message before it leaves; None as long as nobody watches.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._warned: dict[tuple[str, str], int] = {}
        self.sequence = 0
        self.graph: int | None = None
        self.unreported: list[Failed] = []
        self.recent: deque[tuple[float, Failed]] = deque(maxlen=_RECENT_FAILURES)
        self.watch: Callable[[Message], None] | None = None

    def send(self, message: Message) -> None:
        """Send a message to the client."""
        if self.watch is not None:
            self.watch(message)
        self._send(message)

    def reply(self, request: int, result: object, buffers: tuple[Buffer, ...] = ()) -> None:
        """Answer a question."""
        self.send(Reply(RequestId(request), result, buffers))

    def refuse(self, request: int, failed: Failed) -> None:
        """Answer a question with a failure."""
        self.send(Failure(RequestId(request), failed.record))

    def failure(self, error: Exception, op: str, position: int, sequence: int | None = None) -> Failed:
        """Remember a failure and tell the client at once, while it still knows which line recorded the command.

        Args:
            error: what went wrong.
            op: the command's name.
            position: where it stands in its batch.
            sequence: the batch; by default the one that is being executed.

        Raises:
            ContextLostError: the CUDA context of the process is lost with it.
        """
        failed = Failed(error, op, self.sequence if sequence is None else sequence, position)
        if self.graph is not None:
            failed.record["graph"] = self.graph
        raise_if_lost(error, failed)
        self.recent.append((time.time(), failed))
        if len(self.unreported) < _REMEMBERED_FAILURES:
            self.unreported.append(failed)
        self.refuse(0, failed)
        return failed

    def silent_failure(self, error: Exception) -> Failed:
        """Make what stands for a value that is not there, and fails whoever asks for it; until then, nobody is told."""
        return Failed(error, "", self.sequence, 0)

    def mark_seen(self, failed: Failed) -> None:
        """Note that the client knows of this failure, or is just about to."""
        failed.delivered = True
        if failed in self.unreported:
            self.unreported.remove(failed)

    def warn(self, op: str, found: list[KernelWarning], position: int) -> None:
        """Tell the client of a kernel's warnings, each of them a limited number of times.

        Args:
            op: the operation's name.
            found: the warnings.
            position: where the operation stands in its batch.
        """
        for category, message in found:
            key = op, message
            if key not in self._warned and len(self._warned) >= _DIFFERENT_WARNINGS:
                continue
            self._warned[key] = self._warned.get(key, 0) + 1
            if self._warned[key] > _REPORTED_WARNINGS:
                continue
            place = {"sequence": self.sequence, "position": position}
            if self.graph is not None:
                place["graph"] = self.graph
            self.send(Warned(category, message[:_MAX_WARNING_CHARACTERS], place))
