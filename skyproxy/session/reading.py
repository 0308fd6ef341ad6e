"""The reader of a connection, message by message: a thread of its own, or one that connections share."""

from __future__ import annotations

import threading
from collections.abc import Callable

from skyproxy.protocol.messages import Message
from skyproxy.transport.base import Transport
from skyproxy.transport.shared_threads import SharedThreads


class ConnectionReader:
    """The reader of one connection."""

    def __init__(
        self,
        link: Callable[[], Transport],
        take: Callable[[Message], object],
        on_error: Callable[[Exception], bool],
        is_over: Callable[[], bool],
    ) -> None:
        """Make the reader of one connection; `run` or `share` begins to read.

        Args:
            link: gives the connection, which may be replaced.
            take: attends to a message; must be short.
            on_error: told what ended the connection, or went wrong with a message; returns whether to go on.
            is_over: returns whether nobody needs this connection any more.
        """
        self._link = link
        self._take = take
        self._on_error = on_error
        self._is_over = is_over
        self._threads: SharedThreads | None = None
        self._failure: Exception | None = None

    def run(self) -> None:
        """Read until the end; the body of a thread."""
        self._retry(self._take_all)

    def _take_all(self) -> None:
        receive, take = self._link().recv, self._take
        while True:
            take(receive())

    def _retry(self, read: Callable[[], object]) -> bool:
        """Call a function, again and again where the connection breaks; return False where nobody goes on."""
        while True:
            try:
                read()
                return True
            except Exception as error:
                if not self._on_error(error):
                    return False

    # --- on a thread that many share ---------------------------------------------------------------------------------

    def share(self, threads: SharedThreads) -> None:
        """Have those threads read it. While it is broken, it has a thread of its own: to make it anew takes long."""
        self._threads = threads
        threads.watch(self)

    def fileno(self) -> int:
        """As `Receiver.fileno`."""
        return self._link().fileno()

    def receive(self) -> bool:
        """As `Receiver.receive`."""
        link = self._link()
        message = link.recv_ready()
        if message is None:
            return link.is_behind
        try:
            self._take(message)
        except Exception as error:
            self._failure = error
            raise
        return self._link().may_have_more

    def broken(self) -> None:
        """As `Receiver.broken`."""
        if not self._is_over():
            threading.Thread(target=self._mend, name="skyproxy-broken", daemon=True).start()

    def _mend(self) -> None:
        """Wait for the next message, however long that takes, and leave the rest to the shared thread again."""
        if self._retry(self._take_next) and self._threads is not None and not self._is_over():
            self._threads.watch(self)

    def _take_next(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._take(self._link().recv())
