"""A worker that is to go on with another one's session: what it is asked before anybody else reads the connection."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from skyproxy.errors import KERNEL_FAILED, ProtocolError, RemoteError, SessionLostError, visible
from skyproxy.interrupts import raised_by_handler
from skyproxy.protocol import commands
from skyproxy.protocol.answers import checked
from skyproxy.protocol.messages import Batch, Failure, Message, Ping, Pong, Reply, Sequence, Welcome
from skyproxy.session.batch_log import BatchLog
from skyproxy.session.liveness import LEAVING, Liveness, StalledOperations
from skyproxy.settings import SETTINGS
from skyproxy.transport.base import Transport, recv_before

_ANSWER_SECONDS = 600.0
"""The longest wait for a worker to load a snapshot."""
_PING_SECONDS = 1.0
_ABSENCE_SECONDS = 5.0
"""Between two looks, after which this process was stopped itself."""
_FRUITLESS_RECOVERIES = 5
"""Workers in a row that end while they do again what their predecessor had done; then the operations are to blame."""


class WorkerEndedError(SessionLostError):
    """A worker ended that was asked to go on with a session."""


class NewSession(NamedTuple):
    """The connections of a session that was opened to go on with another's work; nobody reads them yet.

    Attributes:
        operations, bulk: its two connections.
        welcome: what the worker said.
        silence_seconds: after which a worker that says nothing, although it is asked, is gone.
    """

    operations: Transport
    bulk: Transport
    welcome: Welcome
    silence_seconds: float = SETTINGS.silence_seconds

    def recv(self, deadline: float) -> Message:
        """Return the next message of the operations connection; ask on the other one whether the worker lives.

        Args:
            deadline: on the clock of `time.monotonic`.

        Raises:
            TimeoutError: the time is over.
            SessionLostError: the worker is gone, says nothing any more, or is about to end.
        """
        heard, came = time.monotonic(), -1
        liveness, stalled = Liveness(self.silence_seconds, _ABSENCE_SECONDS, heard), StalledOperations()
        while True:
            try:
                return recv_before(self.operations, min(deadline, time.monotonic() + _PING_SECONDS))
            except TimeoutError as error:
                if time.monotonic() >= deadline or raised_by_handler(error):
                    raise
            while time.monotonic() < deadline and (message := self.bulk.recv_ready()) is not None:
                if isinstance(message, Pong) and LEAVING in message.load:
                    raise SessionLostError("The worker is gone: it is about to end")
                if isinstance(message, Pong) and self._is_stalled(stalled, is_idle=not message.load.get("executing")):
                    raise SessionLostError("The worker is gone: it says nothing on the operations connection")
            received = self.operations.bytes_received + self.bulk.bytes_received
            if received != came:
                heard, came = time.monotonic(), received
            if liveness.is_gone(time.monotonic(), heard):
                raise SessionLostError(f"The worker is gone: it has said nothing for {self.silence_seconds:g} s")
            self.bulk.post(Ping(0))

    def _is_stalled(self, stalled: StalledOperations, *, is_idle: bool) -> bool:
        link = self.operations
        acked, unacked_bytes = link.connection.acked_sequence, link.connection.unacked_bytes
        return stalled.is_stalled(is_idle, acked, unacked_bytes, link.bytes_received)

    def close(self) -> None:
        """End it: nobody goes on there."""
        self.operations.close()
        self.bulk.close()

    def ask_control(self, sequence: Sequence, name: str, arguments: list[object]) -> Any:
        """Ask a control of the worker; return its answer.

        Raises:
            RemoteError: the control failed.
            WorkerEndedError: the worker ended, or said nothing.
        """
        until = time.monotonic() + _ANSWER_SECONDS
        try:
            self.operations.send(Batch(sequence, [commands.CALL, int(sequence), name, arguments]))
            while True:
                message = self.recv(until)
                if isinstance(message, Reply):
                    return checked(name, message.value)
                if isinstance(message, Failure):
                    raise RemoteError(visible(message.error.get("message") or "it failed"))
        except SessionLostError as error:
            raise WorkerEndedError(str(error)) from error
        except TimeoutError as error:
            if raised_by_handler(error):
                raise
            raise WorkerEndedError(f"no answer to {name} within {_ANSWER_SECONDS:g} s") from None


class FoundSnapshot(NamedTuple):
    """A snapshot that a new session was restored from.

    Attributes:
        start: the batch that began it.
        answer: what the worker that took it said, or would have said.
    """

    start: int
    answer: dict[str, object]


def load_newest(opened: NewSession, name: str, log: BatchLog, starts: list[int], reason: str) -> FoundSnapshot:
    """Restore the newest snapshot in a new session.

    Args:
        opened: the session, which is empty.
        name: the name of the snapshots.
        log: what was sent since them.
        starts: the batches that began snapshots from which it can go on, the newest first.
        reason: why the worker before is left, for people.

    Raises:
        SessionLostError: none can be restored; its cause says so where the new worker has ended as well.
    """
    try:
        rows = opened.ask_control(Sequence(1), "list_snapshots", [name])
        there = {row["sequence"]: str(row["snapshot"]) for row in rows if row.get("sequence") in starts}
        start = next((start for start in starts if start in there), None)
        if start is None:
            raise SessionLostError(f"{reason}; and another worker has no snapshot of this session")
        hole = log.hole_after(start)
        if hole is not None:
            raise SessionLostError(f"{reason}; and since the last snapshot {hole.reason}, which cannot be done again")
        value = opened.ask_control(Sequence(2), "load_snapshot", [name, there[start]])
        if value["sequence"] != start:
            raise SessionLostError(f"{reason}; and another worker restored another snapshot: {value!r:.200}")
        opened.operations.connection.jump_to(Sequence(start))
        answer = {"snapshot": there[start], "sequence": start, "bytes": value.get("bytes", 0), "written_bytes": 0}
        return FoundSnapshot(start, checked("save_snapshot", answer))
    except RemoteError as error:
        raise SessionLostError(f"{reason}; and another worker cannot go on: {error}") from error
    except (KeyError, TypeError) as error:
        raise SessionLostError(f"{reason}; and another worker lists impossible snapshots: {error!r}") from error
    except (WorkerEndedError, ProtocolError) as error:
        raise SessionLostError(f"{reason}; and then: {error}") from WorkerEndedError(str(error))


class ReplayProgress:
    """The progress of workers, one after the other: where several end over the same operations, those are to blame."""

    def __init__(self) -> None:
        self._fruitless = 0
        self._reached = 0

    def begin_anew(self) -> None:
        """Forget the workers that ended without progress."""
        self._fruitless = 0

    def note_end(self, reached: int, reason: str) -> None:
        """Take note that a worker ended after so many batches.

        Raises:
            SessionLostError: so did several before it, and none came further.
        """
        before, self._reached = self._reached, reached
        self._fruitless = self._fruitless + 1 if reached == before else 0
        # An assertion of a kernel fails each time, and what has hit the memory of a GPU does not come again.
        most = 1 if KERNEL_FAILED in reason else _FRUITLESS_RECOVERIES
        if self._fruitless >= most:
            others = "the worker" if self._fruitless == 1 else f"{self._fruitless} workers"
            raise SessionLostError(f"{reason}; and so did {others} before it, over the same operations")
