"""The interface that sessions and workers see: one ordered, reliable, two-way channel of messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from skyproxy.errors import SessionLostError
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.messages import Message

PayloadSink = Callable[[Message], memoryview | None]
"""The memory for the payload of a message, so that a large one lands in its final place without a copy.

It is asked for messages with exactly one buffer that is not empty, before that buffer is read (`message.buffers` is
empty then). It returns memory that is at least as long, of which the first bytes are used, or None for fresh memory.
"""


class LinkDownError(SessionLostError):
    """A connection broke that is being made anew; what was to be sent is not lost, and is its sender's to keep."""


class Transport(Protocol):
    """One connection, after its handshake.

    `send` may be called from any thread and keeps messages whole; `recv` belongs to one thread. A connection that
    `recv` found ended is closed already; `close` is for ending it from our side, and harmless otherwise.
    """

    def send(self, message: Message) -> None:
        """Hands one message to the connection.

        Buffers are borrowed until the call returns. Blocks while the peer is slower than we are. A KeyboardInterrupt
        during the wait leaves the stream whole: the message is still sent in full. Sending the last batch once more,
        the very same object, does nothing; so a caller that was interrupted can simply repeat the call.

        Raises:
            SessionLostError: the connection is gone.
        """

    def recv(self, timeout_seconds: float | None = None) -> Message:
        """The next message. Buffers are valid until the next call, unless the sink supplied them.

        Raises:
            TimeoutError: nothing came in time; the stream is unharmed.
            SessionLostError: the connection is gone, with the peer's reason where it gave one.
            ProtocolError: the peer broke the rules; the connection was closed with that reason.
        """

    def recv_ready(self) -> Message | None:
        """The next message if it has come, else None; never waits. Belongs to the thread that receives.

        Raises:
            SessionLostError: ask `recv`: it says what has become of the connection, and sees to that.
        """
        try:
            return self.recv(0.0)
        except TimeoutError:
            return None

    @property
    def is_behind(self) -> bool:
        """True if `recv_ready` gave nothing because it had read for long enough, and not because nothing is there."""
        return False

    @property
    def may_have_more(self) -> bool:
        """True if `recv_ready` may give a message of which the socket itself tells nothing: it was read already."""
        return True

    def fileno(self) -> int:
        """The descriptor of its socket; -1 once that is closed, or where there is none."""
        return -1

    def post(self, message: Message) -> None:
        """Leaves a short message, other than a batch, to be sent soon; never blocks. A broken connection drops it.

        Raises:
            ProtocolError: the peer does not read what it asks for.
        """

    def repeat(self, message: Message) -> None:
        """Sends a message that an earlier connection of the session took note of already; never blocks."""

    def cut(self) -> bool:
        """Ends the connection without a word, as if the network had.

        Returns:
            Whether no other thread is in `send` or `recv` any more: then nothing changes `connection` from here.
        """
        ...

    @property
    def was_closed(self) -> bool:
        """True if it was ended on purpose, by `close`."""
        ...

    def keep_alive(self) -> None:
        """Sends a few bytes without meaning, so that no proxy on the way takes a silent connection for a dead one.

        Never blocks, never raises.
        """

    def set_sink(self, sink: PayloadSink | None) -> None:
        """Chooses where payloads land. Belongs to the thread that receives."""

    def close(self, code_name: str = "done", reason: str = "") -> None:
        """Says goodbye and ends the connection; idempotent, never raises, bounded in time."""

    def abandon(self) -> None:
        """Lets go of the connection without a word to the peer: in a forked child, because it is the parent's."""

    @property
    def connection(self) -> Connection:
        """The rules and figures of this connection: the last sequence, the unacked bytes, the peer's goodbye.

        After a KeyboardInterrupt out of `send`, `connection.last_sequence` tells whether a batch was taken.
        """
        ...

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...

    @property
    def bytes_unread(self) -> int:
        """Bytes that have come and wait to be read, as far as the system tells."""
        return 0


def recv_before(transport: Transport, deadline: float, clock: Callable[[], float] = time.monotonic) -> Message:
    """The next message, if it comes in time: a peer may send others than the one that is waited for without end.

    Args:
        transport: which connection.
        deadline: on `clock`.

    Raises:
        TimeoutError: the time is over, whether more messages are there or not.
    """
    left_seconds = deadline - clock()
    if left_seconds <= 0:
        raise TimeoutError("the time for an answer is over")
    return transport.recv(left_seconds)
