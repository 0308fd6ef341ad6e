"""A worker without torch: it answers every batch with what it holds, and sends chunks back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from skyproxy.errors import LimitExceededError, SessionLostError
from skyproxy.protocol.messages import Ack, Batch, Chunk, Hello, Ping, Pong, Reply, RequestId, Welcome
from skyproxy.settings import Settings
from skyproxy.transport.base import Transport
from skyproxy_server.listener import Listener, serve

TOKEN = "a-token-that-nobody-should-see-anywhere"
FAST = Settings(close_timeout_seconds=0.3, handshake_timeout_seconds=5.0)


class EchoSession:
    """A session, or its bulk connection, that echoes."""

    def __init__(self, identity: str, transport: Transport) -> None:
        self.welcome = Welcome(0, identity, {"skyproxy": "test"}, [], {})
        self.transport = transport

    def run(self) -> None:
        try:
            while True:
                message = self.transport.recv()
                if isinstance(message, Batch):
                    self.transport.send(Ack(message.sequence))
                    self.transport.send(Reply(RequestId(message.sequence), message.stream, message.buffers))
                elif isinstance(message, Chunk):
                    self.transport.send(message)
                elif isinstance(message, Ping):
                    self.transport.send(Pong(message.number))
        except SessionLostError:
            pass


class EchoHost:
    """Echo sessions, two at most."""

    def __init__(self) -> None:
        self.hellos: list[Hello] = []
        self.sessions: dict[str, EchoSession] = {}

    def open_session(self, hello: Hello, transport: Transport) -> EchoSession:
        self.hellos.append(hello)
        if len(self.sessions) == 2:
            raise LimitExceededError("This worker has 2 sessions, which is its limit.")
        session = EchoSession(f"session-{len(self.sessions)}", transport)
        self.sessions[session.welcome.session] = session
        return session

    def resume_session(self, hello: Hello, transport: Transport) -> EchoSession:
        raise LookupError("echo sessions end with their connection")

    def join_bulk(self, session_id: str, transport: Transport) -> EchoSession:
        self.sessions[session_id]
        return EchoSession(session_id, transport)

    def end_refused(self, refusal: object) -> None:
        """Nothing lasts here without a connection."""

    def join_functions(self, session_id: str, transport: Transport) -> EchoSession:
        return self.join_bulk(session_id, transport)

    def activity(self) -> dict[str, object]:
        return {"sessions": len(self.sessions), "idle_seconds": 1.5}


StartListener = Callable[..., Listener]


@pytest.fixture
def host() -> EchoHost:
    return EchoHost()


@pytest.fixture
def start(host: EchoHost) -> Iterator[StartListener]:
    """Starts listeners and closes them in the end."""
    listeners: list[Listener] = []

    def make(**options: object) -> Listener:
        options = {"settings": FAST, **options}
        listener = serve("127.0.0.1", 0, TOKEN, host, **options)  # type: ignore[arg-type]
        listeners.append(listener)
        return listener

    yield make
    for listener in listeners:
        listener.close()
