"""Connections of a session that are made anew when they break, while the session goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol import framing
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.messages import ANSWERS, BULK, OPERATIONS, Message, Received
from skyproxy.session.handover import Fresh
from skyproxy.session.reconnector import Reconnector
from skyproxy.settings import Settings
from skyproxy.transport.base import LinkDownError, PayloadSink, Transport

_CONFIRM_EVERY = 64
_CONFIRM_BYTES = 256 << 10


class Reconnecting(Transport):
    """A connection whose link is replaced when it breaks. The thread that receives replaces it.

    Attributes:
        role: its kind.
    """

    role: str

    def __init__(self, link: Transport, reconnector: Reconnector) -> None:
        self._link = link
        self._reconnector = reconnector
        self._recoveries = reconnector.recoveries
        self._sink: PayloadSink | None = None
        self._changing = threading.RLock()
        self._over: SessionLostError | None = None
        self._past_bytes = [0, 0]
        self.was_closed = False

    was_closed: bool = False

    def recv(self, timeout_seconds: float | None = None) -> Message:
        while True:
            link = self._link
            try:
                return link.recv(timeout_seconds)
            except SessionLostError as error:
                self._replace(link, error)

    def recv_ready(self) -> Message | None:
        return self._link.recv_ready()

    @property
    def is_behind(self) -> bool:
        return self._link.is_behind

    @property
    def may_have_more(self) -> bool:
        return self._link.may_have_more

    def fileno(self) -> int:
        return self._link.fileno()

    def _replace(self, link: Transport, error: SessionLostError) -> None:
        """Put another link in the place of one that broke.

        Raises:
            SessionLostError: the session is over.
        """
        if not self._is_replaced(link):
            raise error
        try:
            if not link.cut():
                raise error
            recoveries = self._recoveries
            fresh = self._reconnector.connect(self.role, link, recoveries, str(error).rstrip("."))
            try:
                with self._changing:
                    self._past_bytes[0] += link.bytes_sent
                    self._past_bytes[1] += link.bytes_received
                    self._recoveries = recoveries if fresh.start is None else fresh.recoveries
                    fresh.link.set_sink(self._sink)
                    self._take(link, fresh)
                    self._link = fresh.link
                if self._reconnector.is_behind(self.role, self._recoveries):
                    fresh.link.cut()  # it came back to a session that another worker goes on with by now
            except BaseException:
                fresh.link.close()
                raise
            self._close_late(fresh.link, error)
        except ProtocolError as problem:
            self._over = SessionLostError(f"{str(error).rstrip('.')}; and then: {problem}")
            raise self._over.again() from problem
        except SessionLostError as lost:
            self._over = lost.again()  # without the traceback, which holds what all callers have
            raise

    def _is_replaced(self, link: Transport) -> bool:
        """Return whether there will be another link where this one breaks."""
        if self.was_closed or link.was_closed or self._over is not None:
            return False
        return self._reconnector.is_active and self._reconnector.outlives(link.connection.goodbye, self._recoveries)

    def _close_late(self, fresh: Transport, error: SessionLostError) -> None:
        """Close a link that came after `close`; asked after it was assigned, so that `close` cannot miss it."""
        if self.was_closed:
            fresh.close()
            raise error

    def _take(self, link: Transport, fresh: Fresh) -> None:
        raise NotImplementedError

    def post(self, message: Message) -> None:
        self._link.post(message)

    def repeat(self, message: Message) -> None:
        self._link.repeat(message)

    def cut(self) -> bool:
        return self._link.cut()

    def cut_older(self, recoveries: int) -> None:
        """Cut the link, unless it belongs to a session that was restored after so many recoveries."""
        self.cut_if(lambda: self._recoveries <= recoveries)

    def cut_if(self, is_wanted: Callable[[], bool]) -> None:
        """Cut the link that there is when this is asked, if the answer is yes."""
        with self._changing:
            link = self._link if is_wanted() else None
        if link is not None:
            link.cut()

    def keep_alive(self) -> None:
        self._link.keep_alive()

    def set_sink(self, sink: PayloadSink | None) -> None:
        self._sink = sink
        self._link.set_sink(sink)

    def close(self, code_name: str = "done", reason: str = "") -> None:
        self.was_closed = True
        self._reconnector.stop()
        self._link.close(code_name, reason)

    def abandon(self) -> None:
        self.was_closed = True
        self._changing = threading.RLock()
        self._link.abandon()

    @property
    def connection(self) -> Connection:
        return self._link.connection

    @property
    def bytes_sent(self) -> int:
        return self._past_bytes[0] + self._link.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._past_bytes[1] + self._link.bytes_received


class ReconnectingOperations(Reconnecting):
    """The operations connection. What is recorded while it is broken is kept, and leaves when it is back."""

    role = OPERATIONS

    def __init__(self, link: Transport, reconnector: Reconnector, settings: Settings) -> None:
        super().__init__(link, reconnector)
        self._max_frame_bytes = settings.max_frame_bytes
        self._confirmed = 0
        self._unconfirmed_bytes = 0

    def send(self, message: Message) -> None:
        while True:
            link = self._link
            try:
                link.send(message)
                return
            except SessionLostError:
                if not self._is_replaced(link):
                    raise
            if self._keep(link, message):
                return

    def _keep(self, link: Transport, message: Message) -> bool:
        """Take note of a batch that cannot leave now; return False if the link was replaced, and it can."""
        size = sum(map(len, framing.encode(message, self._max_frame_bytes)))
        with self._changing:
            if self._over is not None:
                raise self._over.again()
            if self._link is not link:
                return False
            link.connection.hold(message, size)  # it may have been noted before the link broke: then nothing changes
            return True

    def _take(self, link: Transport, fresh: Fresh) -> None:
        if fresh.start is not None:
            assert self._reconnector.recovery is not None
            self._confirmed = self._unconfirmed_bytes = 0
            self._reconnector.recovery.replay(fresh, link.connection)
            return
        for batch in fresh.link.connection.continue_from(link.connection, fresh.welcome.received):
            fresh.link.repeat(batch)

    def recv(self, timeout_seconds: float | None = None) -> Message:
        message = super().recv(timeout_seconds)
        self._count(message)
        return message

    def recv_ready(self) -> Message | None:
        message = super().recv_ready()
        if message is not None:
            self._count(message)
        return message

    def _count(self, message: Message) -> None:
        if self._reconnector.resumes and type(message) in ANSWERS:
            self._confirm(sum(map(len, getattr(message, "buffers", ()))))

    def _confirm(self, byte_count: int) -> None:
        """Tell the worker, now and then, which answers it need not keep."""
        self._unconfirmed_bytes += byte_count
        count = self._link.connection.answers
        if count - self._confirmed >= _CONFIRM_EVERY or self._unconfirmed_bytes >= _CONFIRM_BYTES:
            self._confirmed, self._unconfirmed_bytes = count, 0
            self._link.post(Received(count))


class ReconnectingBulk(Reconnecting):
    """The bulk connection. What it carried when it broke is its users' to send again: `on_back` tells them.

    Attributes:
        on_back: called on the receiving thread when there is a link again, before anything is received on it.
        on_restored: called so, where the link belongs to a session that was restored.
    """

    role = BULK

    def __init__(self, link: Transport, reconnector: Reconnector) -> None:
        super().__init__(link, reconnector)
        self.on_back: Callable[[Transport], object] = lambda link: None
        self.on_restored: Callable[[Fresh], object] = lambda fresh: None

    @property
    def link(self) -> Transport:
        """The connection that there is now."""
        return self._link

    def send(self, message: Message) -> None:
        """As `Transport.send`.

        Raises:
            LinkDownError: the link is broken; `on_back` will be called.
        """
        link = self._link
        try:
            link.send(message)
        except SessionLostError as error:
            if not self._is_replaced(link):
                raise
            raise LinkDownError(str(error)) from error

    def _take(self, link: Transport, fresh: Fresh) -> None:
        if fresh.start is None:
            self.on_back(fresh.link)
        else:
            self.on_restored(fresh)
