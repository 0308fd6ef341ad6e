"""The connection for functions, on stand-ins for a session and its transport."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from skyproxy.errors import SessionLostError
from skyproxy.functions.channel import FunctionChannel
from skyproxy.settings import Settings


class Link:
    """A connection that says nothing until it is closed."""

    bytes_sent = bytes_received = 0

    def __init__(self) -> None:
        self.closed = threading.Event()

    def recv(self) -> Any:
        assert self.closed.wait(60)
        raise SessionLostError("closed")

    def close(self) -> None:
        self.closed.set()


def test_a_connection_that_opens_while_its_session_ends_is_closed() -> None:
    session = SimpleNamespace(settings=Settings(), at_end=[], auxiliary=[], often=[], lost=None, threads=None)
    session.check = session.wait_until_awake = lambda: None
    link = Link()

    def open_late() -> Link:
        for tell in session.at_end:
            tell(SessionLostError("the node was closed"))
        return link

    channel = FunctionChannel(cast(Any, session), cast(Any, open_late))
    channel.open()
    assert link.closed.is_set()
    for thread in channel._threads:
        thread.join(60)
        assert not thread.is_alive()
